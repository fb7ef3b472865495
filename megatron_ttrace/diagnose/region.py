# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about extent: some rows are wrong, or a whole slice, and the rest is right."""

from __future__ import annotations

import torch

from megatron_ttrace.compare.measure import logical_view
from megatron_ttrace.diagnose.evidence import Evidence, ranges
from megatron_ttrace.mcore.names import ROOT
from megatron_ttrace.trace.findings import Cause, Finding
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey

_MOST = 0.75
"""When more than this is wrong, nothing is learnt from where."""


def token_ids(evidence: Evidence) -> Finding | None:
    """Positions with some token ids are wrong, all others right. The repair: these positions."""
    key = evidence.key
    if key.kind is not Kind.OUTPUT or evidence.reference.ndim != 3:
        return None
    # What the model was given, which may be the batch's ids renamed.
    tokens = evidence.whole(TraceKey(key.iteration, key.microbatch, Kind.INPUT, ROOT, 0))
    table = evidence.whole(TraceKey(key.iteration, STEP_LEVEL, Kind.PARAM, f"{key.name}.weight", 0))
    if tokens is None or table is None or table.ndim != 2:
        return None
    if tokens.T.shape == evidence.reference.shape[:2] != tokens.shape:
        tokens = tokens.T
    if tokens.shape != evidence.reference.shape[:2]:
        return None
    wrong, values = _wrong(evidence, (2,))
    if wrong is None or not wrong.any():
        return None
    bad, good = tokens[wrong].unique(), tokens[~wrong].unique()
    if not len(good) or bool(torch.isin(bad, good).any()):
        return None
    low, high = int(bad.min()), int(bad.max())
    inside = good[(good >= low) & (good <= high)]
    if len(inside):
        return None
    axes, whose = _vocabulary_part(evidence, len(table), low, high)
    text = f"positions whose token id lies in {low}..{high}{whose} are wrong, the rest right"
    held = values[wrong]
    if not held.any():
        text += "; they are zero"
    elif torch.equal(held, held[:1].expand_as(held)):
        row = (table.float() - held[0]).norm(dim=1).argmin()
        near = (table[row].float() - held[0]).norm() <= 1e-2 * held[0].norm()
        text += f"; they all hold row {int(row)} of the table" if near else "; they are all alike"
    return Finding(text, Cause.TOKEN_IDS, axes)


def _vocabulary_part(
    evidence: Evidence, rows: int, low: int, high: int
) -> tuple[tuple[str, ...], str]:
    size = evidence.meshes[0].size("tp") if evidence.meshes else 1
    if size == 1:
        return (), ""
    first, last = low * size // rows, high * size // rows
    owners = f"tp {first}" if first == last else f"tp {first} to {last}"
    return ("tp",), f" (the part of {owners})"


def some_rows(evidence: Evidence) -> Finding | None:
    """Along some dim a minority of rows is wrong. The repair: these rows."""
    best: tuple[float, int, list[int], bool] | None = None
    for dim in range(evidence.reference.ndim):
        others = tuple(d for d in range(evidence.reference.ndim) if d != dim)
        wrong, values = _wrong(evidence, others)
        if wrong is None:
            return None
        share = float(wrong.float().mean())
        if 0 < share <= _MOST and (best is None or share < best[0]):
            held = values.movedim(dim, 0)[wrong]
            best = share, dim, wrong.nonzero().reshape(-1).tolist(), not bool(held.any())
    if best is None:
        return None
    share, dim, indices, zeroed = best
    name = evidence.dim_name(dim)
    axes, whose = _slice_of(evidence, dim, indices)
    state = "zero" if zeroed else "wrong"
    text = f"{name} {ranges(indices)} ({share:.0%}){whose} are {state}, the rest right"
    return Finding(text, Cause.ROWS, axes)


def _wrong(evidence: Evidence, over: tuple[int, ...]) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Which rows are beyond the tolerance, and the values; rows that no failing part holds pass.

    Where several parts hold a row, the worst counts.
    """
    reference = evidence.reference.float()
    values = reference.clone()
    diff = torch.zeros_like(reference)
    for part in evidence.parts:
        for box, piece, there in zip(part.boxes, part.pieces, evidence.expected(part), strict=True):
            error, kept = logical_view(diff, box), logical_view(values, box)
            if piece.shape != there.shape:
                return None, values
            off = torch.nan_to_num((piece - there).abs(), nan=torch.inf)
            kept.copy_(torch.where(off > error, piece, kept))
            torch.maximum(error, off, out=error)
    squares = diff.double().square()
    sizes = reference.double().square()
    if over:
        squares, sizes = squares.mean(over), sizes.mean(over)
    scale = sizes.sqrt().clamp(min=evidence.tolerance.rms)
    wrong = squares.sqrt() > evidence.tolerance.value * scale
    return wrong, values


def _slice_of(evidence: Evidence, dim: int, indices: list[int]) -> tuple[tuple[str, ...], str]:
    """Whether these rows are just what one rank of an axis holds."""
    total = evidence.reference.shape[dim]
    first, count = indices[0], len(indices)
    if indices[-1] - first + 1 != count or total % count or first % count:
        return (), ""
    found = [axis for axis in evidence.axes if evidence.meshes[0].size(axis) == total // count]
    if len(found) != 1 or total == count:
        return (), ""
    return (found[0],), f", the slice of {found[0]} {first // count},"
