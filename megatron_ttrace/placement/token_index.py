# SPDX-License-Identifier: Apache-2.0
"""``TokenIndex``: rows of an expert's tensors, each of which is one token of some microbatch.

A dispatcher sends tokens to the ranks of their experts. An expert receives rows in the order of
their arrival, from several parts of the sequence and several data-parallel ranks' microbatches. The
reference has all rows of one microbatch, sorted by expert and position (``permute`` in
megatron/core/transformer/moe/moe_utils.py). So a rank's tensor consists of parts of several logical
tensors, one per microbatch, and each row is identified by microbatch, position and expert.

Within experts the hidden dim is divided by expert tensor parallelism (``etp``), and what comes out
of the second linear layer is partial: the dispatcher adds it up afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_ttrace.placement.boxes import Box, DimMap, Segment, product, whole
from megatron_ttrace.placement.infer import NoPlacementError, infer_activation
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.placements import BlockShard, Shard
from megatron_ttrace.placement.plan import dims_of

Rows = np.ndarray[tuple[int], np.dtype[np.int64]]

NOBODY = -1
"""Microbatch of a padding row."""
ALIGNMENTS = (16, 32)
"""Rows that FP8 and MXFP8 products need a multiple of (``get_align_size_for_quantization``)."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenIndex:
    """Which tokens the rows of one call of the experts are; int64 arrays of equal length.

    Attributes:
        microbatch: global number of the microbatch, or :data:`NOBODY` for padding.
        position: of the token in its microbatch: ``sequence position * micro batch size + sample``.
        expert: global number of the expert; rows of one expert are consecutive, in its order.
    """

    microbatch: Rows
    position: Rows
    expert: Rows

    @property
    def microbatches(self) -> list[int]:
        """The microbatches that have rows here."""
        return [int(m) for m in np.unique(self.microbatch) if m != NOBODY]

    def of_expert(self, expert: int) -> TokenIndex:
        """The rows of one expert, as its own modules see them."""
        rows = self.expert == expert
        return TokenIndex(self.microbatch[rows], self.position[rows], self.expert[rows])

    def fitted(self, rows: int) -> TokenIndex:
        """This index, padded expert by expert as a quantised matrix product wants it.

        Raises ``NoPlacementError`` when ``rows`` is not the number of tokens, padded or not.
        """
        if rows == len(self.microbatch):
            return self
        experts, counts = np.unique(self.expert, return_counts=True)
        ends = np.cumsum(counts)
        for alignment in ALIGNMENTS:
            missing = -counts % alignment
            if int((counts + missing).sum()) == rows:
                at = np.repeat(ends, missing)
                return TokenIndex(
                    np.insert(self.microbatch, at, NOBODY),
                    np.insert(self.position, at, 0),
                    np.insert(self.expert, at, np.repeat(experts, missing)),
                )
        raise NoPlacementError(f"{rows} rows, where {len(self.microbatch)} tokens were dispatched")


def match(arrived: TokenIndex, reference: TokenIndex, microbatch: int) -> tuple[DimMap, int]:
    """Where the rows of ``microbatch`` lie in the reference's tensor, as a dim map.

    Also the number of rows that the reference does not have, or that came twice.
    """
    local = np.flatnonzero(arrived.microbatch == microbatch)
    logical = np.flatnonzero(reference.microbatch == microbatch)
    width = 1 + int(max(index.position.max(initial=0) for index in (arrived, reference)))
    local_codes = arrived.expert[local] * width + arrived.position[local]
    codes = reference.expert[logical] * width + reference.position[logical]
    _, here, there = np.intersect1d(local_codes, codes, return_indices=True)
    order = np.argsort(here)
    return _runs(local[here[order]], logical[there[order]]), len(local) - len(here)


def _runs(local: Rows, logical: Rows) -> DimMap:
    if not len(local):
        return ()
    breaks = np.flatnonzero((np.diff(local) != 1) | (np.diff(logical) != 1)) + 1
    starts = [0, *breaks.tolist()]
    stops = [*starts[1:], len(local)]
    return tuple(
        Segment(int(local[a]), int(logical[a]), b - a) for a, b in zip(starts, stops, strict=True)
    )


def expert_boxes(
    rows: DimMap,
    local: tuple[int, ...],
    logical: tuple[int, ...],
    mesh: Mesh,
    blocks: int | tuple[int, ...] = 1,
) -> tuple[str, tuple[Box, ...]]:
    """The placement, in words, and the boxes of a tensor whose ``rows`` (:func:`match`) are tokens.

    ``blocks`` are stacked in the last dim, as of :class:`BlockShard`; 1 if none are. Raises
    ``NoPlacementError`` when another dim is neither whole nor divided by ``etp``.
    """
    if len(local) != len(logical):
        raise NoPlacementError(f"{local} does not have as many dims as {logical}")
    maps, words = [rows], ["TokenIndex(0)"]
    etp = mesh.size("etp")
    for dim in range(1, len(logical)):
        if local[dim] == logical[dim]:
            maps.append(whole(logical[dim]))
        elif local[dim] * etp == logical[dim]:
            stacked = blocks != 1 and dim == len(logical) - 1
            rule = BlockShard(dim, blocks) if stacked else Shard(dim)
            maps.append(rule.divide(whole(logical[dim]), mesh.at("etp"), etp))
            words.append(f"etp:{rule}")
        else:
            raise NoPlacementError(f"{local} does not match any division of {logical} by etp={etp}")
    return " ".join(words), product(maps)


def token_positions(
    local: tuple[int, int], mesh: Mesh, seq_length: int, ends: tuple[int, ...] = ()
) -> Rows:
    """Position of each of this rank's tokens in its whole microbatch, in local order.

    ``local`` is this rank's [sequence, micro batch]; the others, and what is raised, as of
    :func:`infer_activation`.
    """
    logical = (seq_length, local[1])
    placement = infer_activation(local, logical, mesh, seq_length=seq_length, ends=ends)
    sequence = dims_of(logical, placement, mesh)[0]
    numbers = np.concatenate([np.arange(s.logical, s.logical + s.length) for s in sequence])
    samples = np.arange(local[1])
    positions: Rows = (numbers[:, None] * local[1] + samples[None, :]).reshape(-1)
    return positions


def ends_of(bounds: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Where the sequences of a microbatch end, its samples laid one after the other.

    ``bounds`` are [samples, tokens + 1], where each sample's sequences start and end, filled up
    with the number of tokens.
    """
    ends: list[int] = []
    for row in bounds:
        start = ends[-1] if ends else 0
        # What fills up a row repeats its last end.
        ends += [start + end for end in sorted(set(row[1:]))]
    return tuple(ends)
