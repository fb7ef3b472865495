# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about replicas: partial sums, averages that were not taken, copies that drifted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart, axis_combinations
from megatron_ttrace.diagnose.scaling import constant_factor
from megatron_ttrace.mcore.names import EMBEDDING_WEIGHT
from megatron_ttrace.trace.findings import Cause, PartialSums, WrongCopies


def partial(evidence: Evidence) -> PartialSums | None:
    """Ranks that differ along some axes only. The repair: sum (or average) over these axes.

    A rank whose copy passed was not kept: the reference's slice is its value.
    """
    for axes in axis_combinations(evidence.axes):
        if not evidence.in_time:
            return None
        sums = {part.rank: _sum(evidence, part, axes) for part in evidence.parts}
        complete = {rank: total for rank, total in sums.items() if total is not None}
        if len(complete) == len(sums) and (found := _partial(evidence, axes, complete)):
            return found
    return None


def _partial(
    evidence: Evidence, axes: tuple[str, ...], sums: dict[int, list[torch.Tensor]]
) -> PartialSums | None:
    ratio = evidence.ratio((sums[part.rank], evidence.expected(part)) for part in evidence.parts)
    if not ratio:
        return None
    if evidence.repairs(lambda part: sums[part.rank]):
        tied = evidence.key.name == EMBEDDING_WEIGHT and "pp" in axes
        return PartialSums(Cause.TIED if tied else Cause.PARTIAL, axes)
    if not evidence.repairs(lambda part: [piece / ratio for piece in sums[part.rank]]):
        return None
    count = math.prod(evidence.size(axis) for axis in axes)
    if abs(ratio / count - 1) <= max(2 * evidence.tolerance.value, 1e-3):
        return PartialSums(Cause.PARTIAL, axes, mean=True)
    return PartialSums(Cause.PARTIAL, axes, factor=constant_factor(evidence, ratio))


def _sum(evidence: Evidence, part: FailedPart, axes: Sequence[str]) -> list[torch.Tensor] | None:
    """The sum over the ranks that differ from a part's rank along ``axes`` only."""
    failing = {one.rank: one for one in evidence.parts}
    fixed = [axis for axis in evidence.axes if axis not in axes]
    group = [
        mesh.rank
        for mesh in evidence.meshes
        if all(mesh.at(axis) == part.mesh.at(axis) for axis in fixed)
        and (not evidence.held or mesh.rank in evidence.held)
    ]
    if len(group) < 2:
        return None
    total = [torch.zeros_like(piece, dtype=torch.float64) for piece in part.pieces]
    for rank in group:
        other = failing.get(rank)
        if other is None and "pp" in axes and not evidence.held:
            continue  # whether that stage holds the tensor is not known
        if other is not None and _region(other) != _region(part):
            return None
        values = other.pieces if other is not None else evidence.expected(part)
        for into, piece in zip(total, values, strict=True):
            into += piece
    return [piece.float() for piece in total]


def _region(part: FailedPart) -> list[object]:
    return [box.region for box in part.boxes]


def some_copies(evidence: Evidence) -> WrongCopies | None:
    """Copies of the same elements of which some pass. The repair: use a right one.

    Copies are those of one pipeline stage.
    """
    wrong = {part.rank for part in evidence.parts}
    right: set[int] = set()
    varied: set[str] = set()
    for part in evidence.parts:
        own = evidence.held.get(part.rank)
        copies = [
            mesh
            for mesh in evidence.meshes
            if own is not None
            and mesh.rank not in wrong
            and evidence.held.get(mesh.rank) == own
            and mesh.at("pp") == part.mesh.at("pp")
        ]
        if not copies:
            return None
        right |= {mesh.rank for mesh in copies}
        varied |= {
            axis for axis in evidence.axes for mesh in copies if mesh.at(axis) != part.mesh.at(axis)
        }
    axes = tuple(axis for axis in evidence.axes if axis in varied)
    return WrongCopies(Cause.COPY, axes, wrong=tuple(sorted(wrong)), right=tuple(sorted(right)))
