# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about place: right values that stand somewhere else."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from megatron_ttrace.compare.measure import logical_view
from megatron_ttrace.diagnose.evidence import Evidence, Part, dot
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.findings import Cause, Finding

_ROWS = 4096
_WIDTH = 8
"""Rows of fewer elements are too alike to be told apart."""
_PROJECTIONS = 6


def rows(evidence: Evidence) -> Finding | None:
    """Each row (along some dim) of a shard is some row of the reference. The repair: put it there.

    This finds shifts, wrong offsets, other ranks' slices, swapped halves, interleaved blocks and
    any other permutation, for they differ only in which row is where.
    """
    shards = _shards(evidence)
    if not shards:
        return None
    for dim in range(evidence.reference.ndim):
        if not evidence.in_time:
            return None
        moves = [_moves(evidence, shard, dim) for shard in shards]
        if all(move is not None for move in moves):
            found = [move for move in moves if move is not None]
            if any(move.to != move.own for move in found):
                return _describe(evidence, dim, found)
    return None


def transposed(evidence: Evidence) -> Finding | None:
    """Two dims of equal size are exchanged. The repair: exchange them back."""
    for first, second in itertools.combinations(range(evidence.reference.ndim), 2):

        def swap(part: Part, first: int = first, second: int = second) -> list[torch.Tensor] | None:
            if len(part.pieces) != 1:
                return None
            (piece,) = part.pieces
            turned = piece.transpose(first, second)
            return [turned] if turned.shape == piece.shape else None

        if evidence.mends(swap):
            names = f"dims {first} and {second}"
            return Finding(f"{names} are transposed", Cause.ORDER)
    return None


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A part with the logical index of each local index, dim by dim."""

    rank: int
    values: torch.Tensor
    at: tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class _Move:
    """Logical rows that a shard should hold, and those that it holds."""

    rank: int
    own: list[int]
    to: list[int]


def _shards(evidence: Evidence) -> list[_Shard]:
    """Each failing part on its own; flat ranges (ZeRO) put together to one whole tensor."""
    if all(part.local is not None for part in evidence.parts):
        return [_shard(part, part.local) for part in evidence.parts if part.local is not None]
    whole = evidence.reference.float().clone()
    for part in evidence.parts:
        for box, piece in zip(part.boxes, part.pieces, strict=True):
            target = logical_view(whole, box)
            if target.shape != piece.shape:
                return []
            target.copy_(piece)
    at = tuple(torch.arange(size) for size in whole.shape)
    return [_Shard(evidence.parts[0].rank, whole, at)] if evidence.parts else []


def _shard(part: Part, local: torch.Tensor) -> _Shard:
    return _Shard(part.rank, local, tuple(_indices(part.boxes, d) for d in range(local.ndim)))


def _indices(boxes: tuple[Box, ...], dim: int) -> torch.Tensor:
    runs = sorted({(box.local[dim], box.logical[dim], box.extent[dim]) for box in boxes})
    pieces = [torch.arange(logical, logical + size) for _, logical, size in runs]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def _moves(evidence: Evidence, shard: _Shard, dim: int) -> _Move | None:
    """Which rows of the reference the shard's rows are, if they are any."""
    there = evidence.reference.float()
    for other, at in enumerate(shard.at):
        if other != dim and len(at) != there.shape[other]:
            there = there.index_select(other, at)
    ours = shard.values.movedim(dim, 0).flatten(1)
    theirs = there.movedim(dim, 0).flatten(1)
    if not (1 < len(theirs) <= _ROWS and ours.shape[1] >= _WIDTH and len(ours)):
        return None
    generator = torch.Generator().manual_seed(1)
    project = torch.randn((ours.shape[1], _PROJECTIONS), generator=generator)
    distance = torch.cdist(ours @ project, theirs @ project)
    own = shard.at[dim]
    # A row that is nearly as near to its own place stays there: equal rows are no move.
    slack = distance.amin(1) + 1e-6 * theirs.norm() + 1e-12
    stays = distance[torch.arange(len(own)), own] <= slack
    to = torch.where(stays, own, distance.argmin(1))
    expected = theirs.index_select(0, to)
    diff, _ = dot([([ours - expected], [ours - expected])])
    size, _ = dot([([expected], [expected])])
    scale = max((size / ours.numel()) ** 0.5, evidence.tolerance.rms)
    if not scale or (diff / ours.numel()) ** 0.5 / scale > evidence.tolerance.value:
        return None
    return _Move(shard.rank, own.tolist(), to.tolist())


def _describe(evidence: Evidence, dim: int, moves: list[_Move]) -> Finding:
    name = evidence.dim_name(dim)
    moved = next(move for move in moves if move.to != move.own)
    shifts = {to - own for move in moves for own, to in zip(move.own, move.to, strict=True)}
    total = evidence.reference.shape[dim]
    if len(shifts) == 1:
        shift = shifts.pop()
        return Finding(
            f"wrong offset: {name} {moved.to[0]}..{moved.to[-1]} stand where "
            f"{moved.own[0]}..{moved.own[-1]} belong (shifted by {shift})",
            Cause.OFFSET,
            _axis_of(evidence, moved, dim),
        )
    if all(not set(move.to) & set(move.own) for move in moves) and all(
        len({to - own for own, to in zip(move.own, move.to, strict=True)}) == 1 for move in moves
    ):
        text = (
            f"rank {moved.rank} holds {name} {moved.to[0]}..{moved.to[-1]}, which belong to "
            f"another rank, instead of {moved.own[0]}..{moved.own[-1]}"
        )
        return Finding(text, Cause.OFFSET, _axis_of(evidence, moved, dim))
    together = sorted({pair for move in moves for pair in zip(move.own, move.to, strict=True)})
    sources, targets = [to for _, to in together], [own for own, _ in together]
    count = sum(own != to for own, to in together)
    if len(set(sources)) < len(sources):
        text = f"{count} of {total} {name} hold the values of other {name}, some of them twice"
        return Finding(text, Cause.ORDER)
    half = len(targets) // 2
    if sources == targets[half:] + targets[:half] and len(targets) == 2 * half:
        text = f"the two halves of its {name} are swapped"
        return Finding(text, Cause.HALVES, (), "gate and up projection are taken for each other")
    if sources == targets[::-1]:
        return Finding(f"its {name} are in reverse order", Cause.ORDER)
    runs = 1 + sum(after != before + 1 for before, after in itertools.pairwise(sources))
    text = f"{count} of {total} {name} are right but in another order, in {runs} blocks"
    return Finding(text, Cause.ORDER)


def _axis_of(evidence: Evidence, move: _Move, dim: int) -> tuple[str, ...]:
    """The axis whose ranks divide the dim in parts of this size, if there is one."""
    parts = evidence.reference.shape[dim] // max(1, len(move.own))
    found = [axis for axis in evidence.axes if evidence.meshes[0].size(axis) == parts > 1]
    return tuple(found) if len(found) == 1 else ()
