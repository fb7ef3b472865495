# SPDX-License-Identifier: Apache-2.0
"""Repairs of the position: right values in the wrong place."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch

from megatron_ttrace.diagnose.evidence import RIGHT, Evidence, FailedPart, indices_of
from megatron_ttrace.trace.findings import (
    Cause,
    Finding,
    OffsetRows,
    ReorderedRows,
    RowOrder,
    Transposed,
)
from megatron_ttrace.trace.views import logical_view

_ROWS = 4096
_WIDTH = 8
"""Rows of fewer elements are too similar to be distinguished."""
_PROJECTIONS = 6


def rows(evidence: Evidence) -> Finding | None:
    """Each row (along some dim) of a shard is some row of the reference. The repair: put it there.

    This finds shifts, wrong offsets, other ranks' slices, swapped halves, interleaved blocks and
    any other permutation: they differ only in which row is where.
    """
    shards = _shards(evidence)
    for dim in range(evidence.reference.ndim):
        moves = []
        for shard in shards:
            if (move := _moves(evidence, shard, dim)) is None:
                break
            moves.append(move)
        if shards and len(moves) == len(shards) and any(move.to != move.own for move in moves):
            return _offset(evidence, dim, moves) or _order(evidence, dim, moves)
    return None


def transposed(evidence: Evidence) -> Iterator[tuple[Finding, Evidence]]:
    """Exchange two dims of equal size."""
    for first, second in itertools.combinations(range(evidence.reference.ndim), 2):

        def swap(part: FailedPart, a: int = first, b: int = second) -> list[torch.Tensor] | None:
            turned = [piece.transpose(a, b) for piece in part.pieces]
            fits = len(turned) == 1 and turned[0].shape == part.pieces[0].shape
            return turned if fits else None

        if (after := evidence.repaired(swap)) is not None:
            yield Transposed(Cause.ORDER, dims=(first, second)), after


@dataclasses.dataclass(frozen=True)
class _Indexed:
    """Values with the logical index of each local index, dim by dim."""

    rank: int
    values: torch.Tensor
    at: tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class _Move:
    """Logical rows that a shard should hold, and those that it holds."""

    rank: int
    own: list[int]
    to: list[int]

    @property
    def shifts(self) -> set[int]:
        """How far the rows are from their places."""
        return {to - own for own, to in zip(self.own, self.to, strict=True)}


def _shards(evidence: Evidence) -> list[_Indexed]:
    """Each failing part on its own; flat ranges (ZeRO) combined into one whole tensor."""
    shards = [
        _Indexed(part.rank, local, tuple(indices_of(part.boxes, d) for d in range(local.ndim)))
        for part in evidence.parts
        if (local := part.laid_out()) is not None
    ]
    # Where rows differ from column to column (tokens of several experts), none is in one place.
    if any(len(at) != size for s in shards for at, size in zip(s.at, s.values.shape, strict=True)):
        return []
    if len(shards) == len(evidence.parts):
        return shards
    values = evidence.reference.float().clone()
    for part in evidence.parts:
        for box, piece in zip(part.boxes, part.pieces, strict=True):
            logical_view(values, box).copy_(piece)
    return [_Indexed(evidence.parts[0].rank, values, tuple(map(torch.arange, values.shape)))]


def _moves(evidence: Evidence, shard: _Indexed, dim: int) -> _Move | None:
    """Which rows of the reference the shard's rows are, if they are any."""
    reference = evidence.reference.float()
    for other, at in enumerate(shard.at):
        if other != dim and len(at) != reference.shape[other]:
            reference = reference.index_select(other, at)
    values, rows = shard.values.movedim(dim, 0), reference.movedim(dim, 0)
    if not (len(values) and len(rows)):
        return None
    ours, theirs = values.reshape(len(values), -1), rows.reshape(len(rows), -1)
    if not (1 < len(theirs) <= _ROWS and ours.shape[1] >= _WIDTH):
        return None
    evidence.work.spend(ours.numel() * _PROJECTIONS + len(ours) * len(theirs) * _PROJECTIONS)
    generator = torch.Generator().manual_seed(1)
    project = torch.randn((ours.shape[1], _PROJECTIONS), generator=generator)
    distance = torch.cdist(ours @ project, theirs @ project)
    own = shard.at[dim]
    # A row that is nearly as near to its own place stays there: equal rows are no move.
    slack = distance.amin(1) + 1e-6 * theirs.norm() + 1e-12
    stays = distance[torch.arange(len(own)), own] <= slack
    to = torch.where(stays, own, distance.argmin(1))
    expected = theirs.index_select(0, to)
    diff, size = (
        float(side.double().square().mean().sqrt()) for side in (ours - expected, expected)
    )
    scale = max(size, evidence.tolerance.rms)
    # Each row that moved is one of all rows: among many short ones some are alike by chance.
    moved = max(1, int((to != own).sum()))
    share = evidence.share(moved * ours.shape[1], moved * math.log2(len(theirs)))
    limit = min(RIGHT * evidence.tolerance.value, share * max(evidence.errors.values()))
    if not scale or not diff / scale <= limit:
        return None
    return _Move(shard.rank, own.tolist(), to.tolist())


def _offset(evidence: Evidence, dim: int, moves: list[_Move]) -> OffsetRows | None:
    """All rows of a shard are shifted by the same distance."""
    shifts = set().union(*(move.shifts for move in moves))
    foreign = all(len(move.shifts) == 1 and not set(move.to) & set(move.own) for move in moves)
    if len(shifts) > 1 and not foreign:
        return None
    moved = next(move for move in moves if move.to != move.own)
    # The axis whose ranks divide the dim into parts of this size, if there is one.
    parts = evidence.reference.shape[dim] // max(1, len(moved.own))
    axes = tuple(axis for axis in evidence.axes if evidence.size(axis) == parts > 1)
    return OffsetRows(
        Cause.OFFSET,
        axes if len(axes) == 1 else (),
        dim=evidence.dim_name(dim),
        rank=moved.rank,
        held=(moved.to[0], moved.to[-1]),
        own=(moved.own[0], moved.own[-1]),
        shift=shifts.pop() if len(shifts) == 1 else None,
    )


def _order(evidence: Evidence, dim: int, moves: list[_Move]) -> ReorderedRows:
    """The rows of all shards together are in another order."""
    together = sorted({pair for move in moves for pair in zip(move.own, move.to, strict=True)})
    targets, sources = [own for own, _ in together], [to for _, to in together]
    half = len(targets) // 2
    order = RowOrder.BLOCKS
    if set(sources) != set(targets):
        order = RowOrder.REPEATED
    elif sources == targets[half:] + targets[:half] and len(targets) == 2 * half:
        order = RowOrder.HALVES
    elif sources == targets[::-1]:
        order = RowOrder.REVERSED
    return ReorderedRows(
        Cause.HALVES if order is RowOrder.HALVES else Cause.ORDER,
        order=order,
        dim=evidence.dim_name(dim),
        moved=sum(own != to for own, to in together),
        total=evidence.reference.shape[dim],
        blocks=1 + sum(after != before + 1 for before, after in itertools.pairwise(sources)),
    )
