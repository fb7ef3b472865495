# SPDX-License-Identifier: Apache-2.0
"""What is done with the tensors of a reference on several ranks: each rank writes its own shards.

A shard's place in the logical tensor follows from both shapes (``placement/infer.py``), and there
is no single device that tells the logical one. But the same layout was compared with a single
device on a shrunk job: by how much every dim of every tensor was divided there, it is divided here.
The rows of experts are tokens: their order is a single device's, by expert and then by position.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from megatron_ttrace.compare.experts import ExpertRows, Match, entry_of
from megatron_ttrace.compare.planning import Placer, RankLayout
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.mcore.roles import any_layer, is_within_experts
from megatron_ttrace.placement.plan import Placements
from megatron_ttrace.placement.token_index import TokenIndex, token_positions
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, RoutingIndex, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter

Divided = tuple[tuple[Kind, str, int, tuple[int, ...]], ...]
"""Kind, name with ``*`` for the layer, and index of a tensor; the parts of each of its dims."""

_Named = tuple[Kind, str, int]


def divided(trial: TraceReader) -> Divided:
    """By how much the ranks of a candidate, equivalent to one device, divided its activations.

    Raises:
        TTraceError: when layers divide a tensor of one name differently, or ranks unevenly.
    """
    parts: dict[_Named, tuple[int, ...]] = {}
    for entries in trial.ranks.values():
        for entry in entries:
            if not _is_activation(entry.key) or entry.misfit or entry.sums:
                continue
            sizes = [*zip(entry.shape, entry.logical_shape, strict=True)]
            if sizes and is_within_experts(entry.key.name):
                sizes[:1] = [(0, 0)]
            if any(here and whole % here for here, whole in sizes):
                raise TTraceError(
                    f"{entry.key.name}: ranks have parts of different sizes, so its shape in a "
                    "larger job is unknown"
                )
            by = tuple(whole // here if here else 1 for here, whole in sizes)
            if parts.setdefault(_named(entry.key), by) != by:
                raise TTraceError(
                    f"{entry.key.name}: layers divide this tensor differently, so its shape in a "
                    "larger job is unknown"
                )
    return tuple((*named, by) for named, by in parts.items())


def _is_activation(key: TraceKey) -> bool:
    return key.microbatch != STEP_LEVEL and key.kind is not Kind.TOKENS


def _named(key: TraceKey) -> _Named:
    return key.kind, any_layer(key.name), key.index


class ShardSink(WriteSink):
    """Stores everything that one rank has, with its place in the logical tensors.

    ``by`` is how activations are divided (:func:`known`). ``all_rows`` is a collective of the ranks
    with the same layers: what all of them dispatch at the same time, sorted, each row once.
    """

    def __init__(
        self,
        writer: TraceWriter,
        iteration: int,
        layout: RankLayout,
        by: Mapping[_Named, tuple[int, ...]],
        all_rows: Callable[[TokenIndex], TokenIndex],
        forecast: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(writer, iteration, forecast)
        self._layout = layout
        self._placer = Placer(layout)
        self._by = by
        self._all_rows = all_rows
        self._of_all: dict[TraceKey, TokenIndex] = {}
        self._experts = ExpertRows(iteration, layout.mesh, self._of_all.get, self._of_experts)

    def _as_stored(self, place: Place, data: torch.Tensor) -> torch.Tensor:
        return self._placer.oriented(TraceKey(self._iteration, *place), data)

    def _entries(self, place: Place, data: torch.Tensor) -> list[Entry]:
        key, local = TraceKey(self._iteration, *place), tuple(data.shape)
        if self._experts.holds(key):
            blocks, factor = self._placer.blocks(key), self._placer.factor(key)
            parts = self._experts.parts(key, local, blocks, factor=factor)
            return [entry_of(part, data, factor) for part in parts if isinstance(part, Match)]
        match = self._placer.place(key, local, self._whole(key, local))
        return [entry_of(match, data, match.factor)]

    def _whole(self, key: TraceKey, local: tuple[int, ...]) -> tuple[int, ...]:
        """The logical shape of an activation."""
        scores = _named(dataclasses.replace(key, index=RoutingIndex.SCORES))
        named = scores if key.kind is Kind.ROUTING else _named(key)
        by = self._by.get(named)
        if by is None or len(by) != len(local):
            raise TTraceError(
                f"{key}: the shrunk job on which the reference's layout was checked has no such "
                "tensor: check a job whose model fits on one device"
            )
        return tuple(size * parts for size, parts in zip(local, by, strict=True))

    def _of_experts(
        self, key: TraceKey, local: tuple[int, ...], rows_key: TraceKey, expert: int | None
    ) -> tuple[int, ...]:
        """The logical shape of a tensor within experts."""
        rows = self._of_all[rows_key]
        rows = rows if expert is None else rows.of_expert(expert)
        return (len(rows.microbatch), *self._whole(key, local)[1:])

    def placed(
        self,
        place: Place,
        data: torch.Tensor,
        logical_shape: Sequence[int],
        placement: Placements,
        first: Place | None = None,
    ) -> None:
        """Store a tensor whose placement is known; with ``first``, another name of that one."""
        key = TraceKey(self._iteration, *place)
        match = self._placer.placed(key, tuple(logical_shape), placement)
        entry = entry_of(match, data, match.factor)
        if first is None:
            self._lines[place] = self._write([entry], data)
        else:
            self._lines[place] = self._write([entry], None, self._lines[first])

    def positions(self, microbatch: int, local: tuple[int, int]) -> torch.Tensor:
        """Positions of this rank's tokens in their microbatch."""
        layout = self._layout
        return torch.from_numpy(token_positions(local, layout.mesh, layout.seq_length))

    def dispatched(self, microbatch: int, experts: str, index: TokenIndex) -> None:
        """Store which tokens this rank's rows are.

        Raises:
            TTraceError: when an expert gets a token twice.
        """
        rows = self._all_rows(index)
        if self._experts.rows_key(microbatch, experts) in self._of_all:
            return  # recomputed
        for number in {microbatch, *rows.microbatches}:
            mine = rows.microbatch == number
            self._of_all[self._experts.rows_key(number, experts)] = TokenIndex(
                rows.microbatch[mine], rows.position[mine], rows.expert[mine]
            )
        data = torch.from_numpy(np.stack([index.position, index.expert], axis=1))
        parts = self._experts.announce(microbatch, experts, index, rows.microbatches)
        if any(part.sums is None or part.sums.diff for part in parts):
            raise TTraceError(f"{experts} of the reference: an expert gets a token twice")
        self._write([entry_of(part, data) for part in parts], data)


def known(by: Divided) -> dict[_Named, tuple[int, ...]]:
    """How activations are divided, by name."""
    return {(kind, name, index): parts for kind, name, index, parts in by}
