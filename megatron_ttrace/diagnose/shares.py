# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about the terms of a gradient, which is a sum over microbatches: some count wrongly.

The reference's activations and activation gradients give each microbatch's share of the gradient
of a linear layer or an embedding. The candidate's gradient is fitted as their weighted sum; the
weights tell whose share is missing, halved or doubled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from megatron_ttrace.compare.measure import logical_view
from megatron_ttrace.diagnose.evidence import Evidence, Part, dot, ranges
from megatron_ttrace.diagnose.sources import product
from megatron_ttrace.mcore.names import EMBEDDING_WEIGHT, ROOT
from megatron_ttrace.mcore.roles import HEAD, LOOKED_UP
from megatron_ttrace.trace.findings import Cause, Finding
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey


@dataclasses.dataclass(frozen=True)
class _Share:
    """What one microbatch adds to a gradient, through one module."""

    module: str
    microbatch: int
    value: torch.Tensor


def weighted(evidence: Evidence) -> Finding | None:
    """Some microbatches' shares do not count once. The repair: count each once.

    Each failing part is fitted on its own: ranks may lack different shares.
    """
    if evidence.key.kind is not Kind.MAIN_GRAD:
        return None
    shares = list(_shares(evidence))
    if len(shares) < 2:
        return None
    total = torch.stack([share.value for share in shares]).sum(0)
    # With a loss per token the gradient is divided by their number only at the step's end.
    cross, size = dot([([evidence.reference.float()], [total])])
    if not size:
        return None
    scale = cross / size
    rest = evidence.reference.float() - total * scale
    if float(rest.norm()) > 0.01 * float(evidence.reference.float().norm()):
        return None
    fits = {part.rank: _fit(part, shares, rest, scale) for part in evidence.parts}

    def counted_once(part: Part) -> list[torch.Tensor]:
        repaired = []
        for box, piece in zip(part.boxes, part.pieces, strict=True):
            for weight, share in zip(fits[part.rank], shares, strict=True):
                piece = piece - (weight - 1) * scale * logical_view(share.value, box)
            repaired.append(piece)
        return repaired

    if not evidence.mends(counted_once):
        return None
    return _describe(evidence, shares, fits)


def _fit(part: Part, shares: list[_Share], rest: torch.Tensor, scale: float) -> list[float]:
    """The weights of the shares in a part. What the shares leave out counts as it should."""
    rows, target = [], []
    for box, piece in zip(part.boxes, part.pieces, strict=True):
        columns = [logical_view(share.value, box).reshape(-1) for share in shares]
        rows.append(torch.stack(columns).double() * scale)
        target.append((piece - logical_view(rest, box)).reshape(-1).double())
    matrix, wanted = torch.cat(rows, 1), torch.cat(target)
    solved: list[float] = torch.linalg.lstsq(
        matrix @ matrix.T, matrix @ wanted, driver="gelsd"
    ).solution.tolist()
    return solved


def _describe(
    evidence: Evidence, shares: list[_Share], fits: dict[int, list[float]]
) -> Finding | None:
    near = max(1e-4, 20 * evidence.tolerance.value)
    ranks = evidence.meshes[0].size("dp") if evidence.meshes else 1
    modules = list(dict.fromkeys(share.module for share in shares))
    said: dict[str, list[int]] = {}
    unequal = False
    for rank, weights in fits.items():
        words = []
        for module in modules:
            own = [(s, w) for s, w in zip(shares, weights, strict=True) if s.module == module]
            counts, by_rank = _counts([(s.microbatch, w) for s, w in own], ranks, near)
            unequal |= by_rank
            words.append((f"{module}'s " if len(modules) > 1 else "its ", counts))
        if len({counts for _, counts in words}) == 1:
            words = [("its ", words[0][1])]
        text = "; ".join(of + counts for of, counts in words if counts)
        said.setdefault(text, []).append(rank)
    if "" in said:
        return None
    if len(said) == 1:
        (text,) = said
    else:
        text = "; ".join(f"on rank {ranges(where)} {words}" for words, where in said.items())
    tied = evidence.key.name == EMBEDDING_WEIGHT and len(modules) > 1
    if tied and len(said) > 1:
        hint = "the stages' copies were summed after each was scattered over dp"
        return Finding(text, Cause.TIED, ("dp",), hint)
    hint = "each rank takes the mean over its own tokens" if unequal else ""
    return Finding(text, Cause.WEIGHTS, ("dp",), hint)


def _counts(weights: list[tuple[int, float]], ranks: int, near: float) -> tuple[str, bool]:
    """Words for the microbatches that do not count once, by data-parallel rank if they agree.

    Also whether each data-parallel rank has a weight of its own, other than zero.
    """
    odd = [(number, weight) for number, weight in weights if abs(weight - 1) > near]
    if not odd:
        return "", False
    by_rank: dict[int, list[float]] = {}
    for number, weight in weights:
        by_rank.setdefault(number % ranks, []).append(weight)
    alike = ranks > 1 and all(max(own) - min(own) <= near for own in by_rank.values())
    what = "dp" if alike else "microbatch"
    listed = (
        [(rank, own[0]) for rank, own in by_rank.items() if abs(own[0] - 1) > near]
        if alike
        else odd
    )
    if all(abs(weight) <= near for _, weight in listed):
        return f"share of {what} {ranges([number for number, _ in listed])} is missing", False
    counts = ", ".join(f"{what} {number}: {weight:.3f}" for number, weight in listed[:8])
    return f"shares count unequally ({counts} instead of 1)", alike


def _shares(evidence: Evidence) -> Iterator[_Share]:
    """Every microbatch's share, through every module that uses the parameter."""
    module, _, leaf = evidence.key.name.rpartition(".")
    if leaf not in ("weight", "bias"):
        return
    modules = [module, HEAD] if _is_tied(evidence) else [module]
    for one in modules:
        for microbatch in range(1 << 16):
            if not evidence.in_time:
                return
            value = _share(evidence, one, leaf, microbatch)
            if value is None:
                break
            if value.shape == evidence.reference.shape:
                yield _Share(one, microbatch, value)


def _is_tied(evidence: Evidence) -> bool:
    """Whether the output layer uses this parameter, too: then it has none of its own."""
    head = TraceKey(evidence.key.iteration, STEP_LEVEL, Kind.PARAM, f"{HEAD}.weight", 0)
    return evidence.key.name == EMBEDDING_WEIGHT and evidence.whole(head) is None


def _share(evidence: Evidence, module: str, leaf: str, microbatch: int) -> torch.Tensor | None:
    place = (evidence.key.iteration, microbatch)
    looked_up = LOOKED_UP.get(module.rpartition(".")[2])
    if leaf == "weight" and looked_up is None:
        return product(evidence, module, module, microbatch)
    gradient = evidence.whole(TraceKey(*place, Kind.GRAD_OUTPUT, module, 0))
    if gradient is None:
        return None
    if leaf == "bias":
        return gradient.float().flatten(0, -2).sum(0)
    ids = evidence.whole(TraceKey(*place, Kind.INPUT, ROOT, looked_up or 0))
    if ids is None or ids.numel() * gradient.shape[-1] != gradient.numel():
        return None
    if ids.shape != gradient.shape[:-1]:
        ids = ids.T
    table = torch.zeros(evidence.reference.shape)
    if math.prod(ids.shape) and int(ids.max()) >= len(table):
        return None
    return table.index_add_(0, ids.reshape(-1), gradient.float().flatten(0, -2))
