# SPDX-License-Identifier: Apache-2.0
"""Partial sums and averages that were not taken; copies of which some are right."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart, Pieces, axis_combinations
from megatron_ttrace.trace.findings import Cause, Finding, PartialSums, WrongCopies
from megatron_ttrace.trace.views import logical_view

type _Parts = Mapping[int, list[Pieces]]


def reduced(evidence: Evidence) -> Iterator[tuple[Finding, Evidence]]:
    """Sum, or average, over ranks whose values differ along some axes only.

    A rank that passes has the whole sum: nothing can be added to it. Copies that agree are not
    partial sums: their sum is a multiple of them.
    """
    for axes in axis_combinations(evidence.axes):
        groups = {part.rank: _group(evidence, part, axes) for part in evidence.parts}
        total = evidence.repaired(functools.partial(_sum, evidence, groups))
        if total is None or _agree(evidence, total, groups):
            continue
        # A mean of noise is as much smaller.
        fewest = min(map(len, groups.values()))
        total = dataclasses.replace(total, explained=evidence.explained / math.sqrt(fewest))
        yield PartialSums(Cause.PARTIAL, axes), total
        mean = total.repaired(functools.partial(_mean, groups))
        if mean is not None:
            yield PartialSums(Cause.PARTIAL, axes, mean=True), mean


def _group(evidence: Evidence, part: FailedPart, axes: Sequence[str]) -> list[int]:
    """The ranks that differ from a part's rank along ``axes`` only, and may hold the tensor."""
    fixed = [axis for axis in evidence.axes if axis not in axes]
    failing = {other.rank for other in evidence.parts}
    return [
        mesh.rank
        for mesh in evidence.meshes
        if all(mesh.at(axis) == part.mesh.at(axis) for axis in fixed)
        and (not evidence.held or mesh.rank in evidence.held)
        # Without knowing who holds it, another stage counts only if it fails.
        and (mesh.rank in failing or "pp" not in axes or bool(evidence.held))
    ]


def _sum(
    evidence: Evidence, groups: Mapping[int, Sequence[int]], part: FailedPart
) -> list[torch.Tensor] | None:
    group = groups[part.rank]
    if len(group) < 2:
        return None
    failing = {other.rank: other for other in evidence.parts}
    total = [torch.zeros_like(piece, dtype=torch.float64) for piece in part.pieces]
    for rank in group:
        other = failing.get(rank)
        if other is None or [b.region for b in other.boxes] != [b.region for b in part.boxes]:
            return None
        for into, piece in zip(total, other.pieces, strict=True):
            into += piece
    evidence.work.spend(len(group) * sum(piece.numel() for piece in total))
    return [piece.float() for piece in total]


def _mean(groups: Mapping[int, Sequence[int]], part: FailedPart) -> list[torch.Tensor]:
    return [piece / len(groups[part.rank]) for piece in part.pieces]


def _agree(evidence: Evidence, total: Evidence, groups: Mapping[int, Sequence[int]]) -> bool:
    """Whether every rank holds the mean of its group."""
    for part, summed in zip(evidence.parts, total.parts, strict=True):
        count = len(groups[part.rank])
        for piece, whole_sum in zip(part.pieces, summed.pieces, strict=True):
            off = torch.linalg.vector_norm(piece - whole_sum / count)
            if not off <= evidence.tolerance.value * torch.linalg.vector_norm(piece):
                return False
    return True


def parts_summed(evidence: Evidence) -> Finding | None:
    """Every part is the sum, or the mean, of what ranks along some axes should have apart.

    The repair: each rank's own part.
    """
    for axes in axis_combinations(evidence.axes):
        parts = {part.rank: _different(evidence, part, axes) for part in evidence.parts}
        for divides in (False, True) if all(parts.values()) else ():

            def own(part: FailedPart, *, mean: bool = divides, of: _Parts = parts) -> Pieces:
                others = of[part.rank]
                total = [torch.stack(pieces).sum(0) for pieces in zip(*others, strict=True)]
                scale = len(others) if mean else 1
                triples = zip(evidence.expected(part), part.pieces, total, strict=True)
                return [right + (piece - summed / scale) for right, piece, summed in triples]

            if evidence.repairs(own):
                return Finding(Cause.PARTS, axes)
    return None


def _different(evidence: Evidence, part: FailedPart, axes: Sequence[str]) -> list[Pieces]:
    """The reference's values of the different parts along axes; empty if it has no such parts."""
    held = (evidence.held.get(rank, ()) for rank in _group(evidence, part, axes))
    apart = {tuple(box.region for box in boxes): boxes for boxes in held}
    extents = [box.extent for box in part.boxes]
    is_alike = all([box.extent for box in boxes] == extents for boxes in apart.values())
    if len(apart) < 2 or not is_alike or tuple(box.region for box in part.boxes) not in apart:
        return []
    evidence.work.spend(len(apart) * sum(map(torch.Tensor.numel, part.pieces)))
    return [
        [logical_view(evidence.reference, box).float() for box in boxes] for boxes in apart.values()
    ]


def some_copies(evidence: Evidence) -> WrongCopies | None:
    """Copies of the same elements of which some pass. Copies are those of one pipeline stage.

    Within a blind tolerance, a copy that passes may be as wrong.
    """
    if evidence.tolerance.blind:
        return None
    wrong = {part.rank for part in evidence.parts}
    right: set[int] = set()
    for part in evidence.parts:
        boxes = evidence.held.get(part.rank)
        copies = {
            mesh.rank
            for mesh in evidence.meshes
            if boxes is not None
            and mesh.rank not in wrong
            and evidence.held.get(mesh.rank) == boxes
            and mesh.at("pp") == part.mesh.at("pp")
        }
        if not copies:
            return None
        right |= copies
    return WrongCopies(Cause.COPY, wrong=tuple(sorted(wrong)), right=tuple(sorted(right)))
