# SPDX-License-Identifier: Apache-2.0
"""What is done with the reference's captured tensors: they are written."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from megatron_ttrace.compare.experts import encode_rows, within
from megatron_ttrace.placement.plan import Placements
from megatron_ttrace.placement.token_index import NOBODY, TokenIndex
from megatron_ttrace.trace.captured import Place, Routed
from megatron_ttrace.trace.modules import is_within, module_of
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, RoutingIndex, TraceKey
from megatron_ttrace.trace.staging import to_device
from megatron_ttrace.trace.store import Entry, TraceWriter


class WriteSink:
    """Stores what the only rank of a reference has, each tensor once; other names point at it.

    ``forecast`` is called once, when the first microbatch's forward pass has ended, with the number
    of its bytes; what it raises ends the step's capture.
    """

    def __init__(
        self, writer: TraceWriter, iteration: int, forecast: Callable[[int], None] | None = None
    ) -> None:
        self._writer = writer
        self._iteration = iteration
        self._lines: dict[Place, int] = {}
        self._forecast = forecast
        self._bytes = 0
        self._routed: dict[Place, torch.Tensor] = {}
        self._rows: dict[tuple[int, str], TokenIndex] = {}

    def tensor(self, places: Sequence[Place], data: torch.Tensor) -> None:
        """Store ``data`` under its first name and point the others at it."""
        first, *others = places
        data = self._as_stored(first, data)
        self._see(first, data)
        self._lines[first] = self._write(self._entries(first, data), data)
        for place in others:
            self._point(first, place, data)

    def repeat(self, first: Place, place: Place, data: torch.Tensor) -> None:
        """Point another name at data that is stored already."""
        self._point(first, place, self._as_stored(place, data))

    def again(self, *_: object) -> None:
        """Keep what was there at first."""

    def _point(self, first: Place, place: Place, data: torch.Tensor) -> None:
        self._lines[place] = self._write(self._entries(place, data), None, self._lines[first])

    def _write(self, entries: Iterable[Entry], data: torch.Tensor | None, same_as: int = -1) -> int:
        """Write lines of one tensor, the first with its data if given; returns the data's line."""
        for entry in entries:
            line = self._writer.add(dataclasses.replace(entry, same_as=same_as), data)
            data, same_as = None, line if same_as < 0 else same_as
        return same_as

    def placed(
        self,
        place: Place,
        data: torch.Tensor,
        logical_shape: Sequence[int],
        placement: Placements,
        first: Place | None = None,
    ) -> None:
        """Store a tensor whose placement is known; with ``first``, another name of that one."""
        whole = data.detach().reshape(tuple(logical_shape))
        if first is None:
            self.tensor((place,), whole)
        else:
            self.repeat(first, place, whole)

    def replace(self, place: Place, data: torch.Tensor) -> torch.Tensor | None:
        """A reference is never isolated."""
        return None

    def _see(self, place: Place, data: torch.Tensor) -> None:
        microbatch, kind, *_ = place
        if self._forecast is None or kind is Kind.TOKENS or microbatch == STEP_LEVEL:
            return
        if microbatch == 0 and kind not in (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT):
            self._bytes += data.nbytes
        else:
            forecast, self._forecast = self._forecast, None
            forecast(self._bytes)

    def _entries(self, place: Place, data: torch.Tensor) -> list[Entry]:
        """The lines of a tensor: each says where a part of it is in a logical one."""
        return [Entry.of(TraceKey(self._iteration, *place), data)]

    def routed(self, microbatch: int, router: str, routed: Routed) -> torch.Tensor | None:
        """Store the scores and the choice; every other pass repeats the first run's choice."""
        first = (microbatch, Kind.ROUTING, router, RoutingIndex.CHOICE)
        place = (microbatch, Kind.ROUTING, routed.of(router), RoutingIndex.CHOICE)
        if place not in self._routed:
            self.tensor(((*place[:3], RoutingIndex.SCORES),), routed.scores)
        own = self._once(place, routed.chosen)
        return self._routed.get(first, own)

    def kept(
        self, microbatch: int, router: str, probabilities: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor | None:
        """Store what is left of the choice."""
        return self._once((microbatch, Kind.ROUTING, router, RoutingIndex.KEPT), kept)

    def _once(self, place: Place, data: torch.Tensor) -> torch.Tensor:
        """Store a tensor the first time; returns what is stored."""
        if place not in self._routed:
            self.tensor((place,), data)
            self._routed[place] = data
        return self._routed[place]

    def positions(self, microbatch: int, local: tuple[int, int]) -> torch.Tensor:
        """The reference has whole microbatches."""
        return torch.arange(local[0] * local[1])

    def dispatched(self, microbatch: int, experts: str, index: TokenIndex) -> None:
        """Store which tokens the experts' rows are."""
        place = (microbatch, Kind.ROUTING, experts, 0)
        if place not in self._lines:
            self.tensor((place,), encode_rows(index))
            self._rows[microbatch, experts] = index

    def _as_stored(self, place: Place, data: torch.Tensor) -> torch.Tensor:
        """The tensor as one device would have it: without rows that pad a quantised product."""
        microbatch, kind, name, _ = place
        if not data.ndim or kind is Kind.ROUTING:
            return data
        for (number, experts), rows in self._rows.items():
            if number != microbatch or not is_within(name, experts):
                continue
            expert, _ = within(module_of(name), experts)
            mine = rows if expert is None else rows.of_expert(expert)
            real = np.flatnonzero(mine.fitted(data.shape[0]).microbatch != NOBODY)
            if len(real) != data.shape[0]:
                return data.detach()[to_device(torch.from_numpy(real), data.device)]
        return data
