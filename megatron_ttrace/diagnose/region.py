# SPDX-License-Identifier: Apache-2.0
"""Where a tensor is wrong (token ids, rows, parts), and the values that are there instead."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart, dot, flat, is_constant
from megatron_ttrace.diagnose.scaling import constant_factor, tested
from megatron_ttrace.diagnose.sources import by_microbatch, ids_by_row
from megatron_ttrace.trace.findings import Cause, Finding, InPart, Span, WrongRows, WrongTokens
from megatron_ttrace.trace.records import ROOT, Kind
from megatron_ttrace.trace.views import logical_view

_LIKELY = 8
"""Other tensors that a part of this one is compared with."""
_FITTED = 0.25
"""Of the error at most this may be left where the place of a fault was fitted."""
_MOST = 0.75
"""If more than this is wrong, nothing is learnt from where it is."""


def token_ids(evidence: Evidence) -> WrongTokens | None:
    """An embedding gives some token ids other rows of its table, or none. The repair: their own."""
    table = evidence.parameter(f"{evidence.key.name}.weight")
    where = _tokens(evidence)
    if where is None or table is None or table.ndim != 2:
        return None
    return evidence.instead(_looked_up(evidence, *where, table.float()))


def _looked_up(
    evidence: Evidence,
    wrong: torch.Tensor,
    values: torch.Tensor,
    tokens: WrongTokens,
    table: torch.Tensor,
) -> Iterator[tuple[WrongTokens, torch.Tensor]]:
    """The nearest rows of the table in the place of the wrong ones, or added to the right ones."""
    ours, right = values[wrong], evidence.reference.float()[wrong]
    for added in (False, True):
        looked_up = ours - right if added else ours
        zero = not looked_up.any()
        evidence.work.spend(len(looked_up) * table.numel())
        rows = torch.cdist(looked_up, table).argmin(1)
        other = evidence.reference.float().clone()
        other[wrong] = added * right + (not zero) * table[rows]
        span = None if zero else (int(rows.min()), int(rows.max()))
        yield dataclasses.replace(tokens, zero=zero, rows=span, added=added), other


def other_samples(evidence: Evidence) -> Finding | None:
    """A batch has samples of several of the step's microbatches. The repair: those of its own."""
    key = evidence.key
    if key.kind is not Kind.TOKENS or evidence.reference.ndim < 2:
        return None
    batches = by_microbatch(evidence, lambda number: evidence.tensor(key.kind, key.name, number))
    samples = torch.cat(batches).float().flatten(1)
    ours = _wrong(evidence, ())[1].flatten(1)
    evidence.work.spend(len(ours) * samples.numel())
    same = torch.stack([(samples == sample).all(1) for sample in ours])
    found = same.int().argmax(1)
    if not same.any(1).all() or len((found // len(ours)).unique()) == 1:
        return None
    others = samples[found].view_as(evidence.reference)
    return Finding(Cause.SAMPLES) if evidence.holds(others) else None


def scaled_rows(evidence: Evidence) -> WrongRows | None:
    """Along some dim a few rows are zero, or multiplied by a constant. The repair: these rows."""
    rows = _rows(evidence)
    if rows is None:
        return None
    at, right = torch.tensor(rows.indices), evidence.reference.float()
    theirs = right.index_select(rows.at, at)
    ours = _wrong(evidence, ())[1].index_select(rows.at, at)

    distinct = len(theirs.abs().unique())

    def repairs(ratio: float, fitted: int) -> bool:
        other = right.index_copy(rows.at, at, ratio * theirs)
        left = evidence.share(distinct - fitted, math.log2(2 * _LIKELY))
        return all(
            evidence.error(part, part.pieces, other)
            <= min(evidence.limit(part), left * evidence.errors[part.rank])
            for part in evidence.parts
        )

    cross, size = dot([([ours], [theirs])])
    fault: Finding | None = None
    if not ours.any():
        fault = Finding(Cause.ZERO) if repairs(0.0, 0) else None
    elif cross and size:
        fault = tested(evidence, constant_factor(evidence, cross / size), repairs)
    if fault is None:
        return None
    return dataclasses.replace(rows, cause=fault.cause, axes=fault.axes or rows.axes, fault=fault)


def in_part(evidence: Evidence) -> InPart | None:
    """Elements that follow each other in each rank's part have another fault than the rest.

    The repair: undo it there. Which elements these are follows from the fault: of all runs, the one
    in which it explains most of the error.
    """
    parts = evidence.parts
    total = {part.rank: sum(piece.numel() for piece in part.pieces) for part in parts}
    for fault, values in _faults(evidence):
        spans: dict[int, Span] = {}
        repaired: dict[int, list[torch.Tensor]] = {}
        for part in parts:
            ours, right = flat(part.pieces).double(), flat(evidence.expected(part)).double()
            off = flat(values(part)).double() - right
            evidence.work.spend(4 * len(ours))
            first, last = _best_run((ours - right).square() - (ours - right - off).square())
            held = ours[first : last + 1]
            if fault.cause is Cause.ZERO and held.any():
                break
            if fault.cause in (Cause.OTHER_TIME, Cause.OTHER_MODULE) and is_constant(held):
                break
            spans[part.rank] = first, last
            ours[first : last + 1] -= off[first : last + 1]
            pieces = ours.float().split([piece.numel() for piece in part.pieces])
            repaired[part.rank] = [
                piece.view(former.shape) for piece, former in zip(pieces, part.pieces, strict=True)
            ]
        if len(repaired) < len(parts):
            continue
        if any(last - first + 1 < total[rank] for rank, (first, last) in spans.items()) and all(
            evidence.error(part, repaired[part.rank])
            <= _left(evidence, part, spans[part.rank], total[part.rank])
            for part in parts
        ):
            by_rank = tuple((rank, span, total[rank]) for rank, span in sorted(spans.items()))
            return InPart(fault.cause, fault.axes, fault=fault, spans=by_rank)
    return None


def _left(evidence: Evidence, part: FailedPart, span: Span, total: int) -> float:
    """The error that may be left where one of all runs was chosen, and one of some faults."""
    values = min(span[1] - span[0] + 1, evidence.distinct[part.rank])
    share = min(_FITTED, evidence.share(values, 2 * math.log2(total) + math.log2(2 * _LIKELY)))
    return min(evidence.limit(part), share * evidence.errors[part.rank])


def _faults(
    evidence: Evidence,
) -> Iterator[tuple[Finding, Callable[[FailedPart], Sequence[torch.Tensor]]]]:
    """What elements may hold instead of their own values."""
    yield Finding(Cause.ZERO), lambda part: [torch.zeros_like(piece) for piece in part.pieces]
    for axis in evidence.axes:
        for ratio in (evidence.size(axis), 1 / evidence.size(axis)):
            scaled = evidence.reference.float() * ratio
            of_part = functools.partial(evidence.expected, reference=scaled)
            yield constant_factor(evidence, ratio), of_part
    for finding, key in itertools.islice(evidence.others(), _LIKELY):
        other = evidence.whole(key)
        if other is not None and other.shape == evidence.reference.shape:
            yield finding, functools.partial(evidence.expected, reference=other)


def _best_run(gain: torch.Tensor) -> Span:
    """First and last of the elements, following each other, with the largest sum."""
    total = torch.cat([gain.new_zeros(1), gain.cumsum(0)])
    lowest, at = total.cummin(0)
    end = int((total - lowest).argmax())
    return int(at[end]), end - 1


def extent(evidence: Evidence) -> Finding | None:
    """Which positions or rows are wrong while the rest is right; why is not known."""
    where = _tokens(evidence)
    return where[2] if where is not None else _rows(evidence)


def _tokens(evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor, WrongTokens] | None:
    """The positions that are wrong, and all values, if it depends on the token id which are."""
    key, shape = evidence.key, evidence.reference.shape[:2]
    if key.kind is not Kind.OUTPUT or evidence.reference.ndim != 3:
        return None
    # What the model was given, which may be the batch's ids renamed.
    tokens = ids_by_row(evidence.tensor(Kind.INPUT, ROOT), shape)
    table = evidence.parameter(f"{key.name}.weight")
    if tokens is None or table is None:
        return None
    wrong, values = _wrong(evidence, (2,))
    if not wrong.any():
        return None
    bad, good = tokens[wrong].unique(), tokens[~wrong].unique()
    low, high = int(bad.min()), int(bad.max())
    if not len(good) or bool(((good >= low) & (good <= high)).any()):
        return None
    size = evidence.size("tp")
    owners = (low * size // len(table), high * size // len(table)) if size > 1 else None
    axes = ("tp",) if size > 1 else ()
    return wrong, values, WrongTokens(Cause.TOKEN_IDS, axes, ids=(low, high), owners=owners)


def _rows(evidence: Evidence) -> WrongRows | None:
    """A minority of wrong rows along a dim, the dim with the smallest share of them."""
    rows = []
    for dim, total in enumerate(evidence.reference.shape):
        others = tuple(d for d in range(evidence.reference.ndim) if d != dim)
        wrong, _ = _wrong(evidence, others)
        indices = tuple(wrong.nonzero().reshape(-1).tolist())
        if 0 < len(indices) <= _MOST * total:
            slice_of = _slice_of(evidence, total, indices)
            rows.append(
                WrongRows(
                    Cause.ROWS,
                    slice_of[:1] if slice_of else (),
                    dim=evidence.dim_name(dim),
                    at=dim,
                    indices=indices,
                    total=total,
                    slice_of=slice_of,
                )
            )
    return min(rows, key=lambda wrong: len(wrong.indices) / wrong.total, default=None)


def _wrong(evidence: Evidence, over: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows are beyond the tolerance, and the values; rows that no failing part holds pass.

    Where several parts hold a row, the worst counts.
    """
    evidence.work.spend(4 * evidence.reference.numel() + evidence.elements)
    reference = evidence.reference.float()
    values = reference.clone()
    diff = torch.zeros_like(reference)
    for part in evidence.parts:
        for box, piece, right in zip(part.boxes, part.pieces, evidence.expected(part), strict=True):
            error, kept = logical_view(diff, box), logical_view(values, box)
            off = torch.nan_to_num((piece - right).abs(), nan=torch.inf)
            kept.copy_(torch.where(off > error, piece, kept))
            torch.maximum(error, off, out=error)
    squares = diff.double().square()
    sizes = reference.double().square()
    if over:
        squares, sizes = squares.mean(over), sizes.mean(over)
    scale = sizes.sqrt().clamp(min=evidence.tolerance.rms)
    return squares.sqrt() > evidence.tolerance.value * scale, values


def _slice_of(evidence: Evidence, total: int, indices: Sequence[int]) -> tuple[str, int] | None:
    """The axis and the rank on it that hold just these rows of a dim."""
    first, count = indices[0], len(indices)
    if indices[-1] - first + 1 != count or total % count or first % count or total == count:
        return None
    axes = [axis for axis in evidence.axes if evidence.size(axis) == total // count]
    return (axes[0], first // count) if len(axes) == 1 else None
