# SPDX-License-Identifier: Apache-2.0
"""What is done with the tensors of a reference on several ranks: each rank writes its own shards.

A shard's place in the logical tensor follows from both shapes (``placement/infer.py``), and there
is no single device that tells the logical one. But the same layout was compared with a single
device on a shrunk job: by how much every dim of every tensor was divided there, it is divided here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch

from megatron_ttrace.compare.planning import Placer, RankLayout
from megatron_ttrace.compare.writing import Storing
from megatron_ttrace.mcore.roles import any_layer
from megatron_ttrace.placement.plan import Placements, describe, plan
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
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


class ShardSink(Storing):
    """Stores everything that one rank has, with its place in the logical tensors.

    ``by`` is how activations are divided (:func:`known`).
    """

    def __init__(
        self,
        writer: TraceWriter,
        iteration: int,
        layout: RankLayout,
        by: Mapping[_Named, tuple[int, ...]],
        forecast: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(writer, iteration, forecast)
        self._layout = layout
        self._placer = Placer(layout)
        self._by = by

    def _entry(self, place: Place, data: torch.Tensor) -> Entry:
        key, local = TraceKey(self._iteration, *place), tuple(data.shape)
        by = self._by.get(_named(key))
        if by is None or len(by) != len(local):
            raise TTraceError(
                f"{key}: the shrunk job on which the reference's layout was checked has no such "
                "tensor: check a job whose model fits on one device"
            )
        whole = tuple(size * parts for size, parts in zip(local, by, strict=True))
        match = self._placer.place(key, local, whole)
        return Entry.of(
            key,
            data,
            logical_shape=whole,
            placement=match.placement,
            boxes=match.boxes,
            factor=match.factor,
            partial_over=match.partial_over,
        )

    def placed(
        self, place: Place, data: torch.Tensor, logical_shape: Sequence[int], placement: Placements
    ) -> None:
        """Store a tensor whose placement is known."""
        key, whole = TraceKey(self._iteration, *place), tuple(logical_shape)
        entry = Entry.of(
            key,
            data,
            logical_shape=whole,
            placement=describe(placement),
            boxes=plan(whole, placement, self._layout.mesh),
            factor=self._placer.factor(key),
        )
        self._lines[place] = self._writer.add(entry, data)

    def _without_experts(self, *_: object) -> NoReturn:
        raise TTraceError("a reference on several ranks cannot have experts")

    positions = dispatched = routed = kept = _without_experts


def known(by: Divided) -> dict[_Named, tuple[int, ...]]:
    """How activations are divided, by name."""
    return {(kind, name, index): parts for kind, name, index, parts in by}
