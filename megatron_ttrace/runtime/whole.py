# SPDX-License-Identifier: Apache-2.0
"""A saved candidate's shards, put together to whole tensors: its trace can then be a reference."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.measure import local_view, logical_view
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.moments import Moments
from megatron_ttrace.compare.offline import meshes_of
from megatron_ttrace.placement.coverage import coverage
from megatron_ttrace.runtime.conclusion import unjudged
from megatron_ttrace.trace.records import Reason, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader


class WholeTensors:
    """The logical tensors of a saved candidate."""

    def __init__(self, candidate: TraceReader) -> None:
        """Read which rank holds what. Raises ``TTraceError`` when ranks are missing."""
        self._candidate = candidate
        self._mesh = meshes_of(candidate)[0]
        self._config = RunConfig.from_json(candidate.meta.get("config"))
        self._held: dict[TraceKey, list[tuple[int, int]]] = {}
        for rank, entries in candidate.ranks.items():
            for number, entry in enumerate(entries):
                self._held.setdefault(entry.key, []).append((rank, number))

    def __iter__(self) -> Iterator[TraceKey]:
        """All keys, rank by rank."""
        return iter(self._held)

    def __contains__(self, key: TraceKey) -> bool:
        return key in self._held

    def is_judged_by_sums(self, key: TraceKey) -> bool:
        """Whether sums were kept instead of the tensor."""
        return all(entry.sums for entry in self._entries(key))

    def _entries(self, key: TraceKey) -> list[Entry]:
        return [self._candidate.resolve(*where) for where in self._held[key]]

    def unjudged(self, key: TraceKey) -> Reason | None:
        """Why the tensor is not a single device's by design, in this layout."""
        holders = [
            Measured(key, entry.placement, entry.boxes, entry.logical_shape, None)
            for entry in self._entries(key)
        ]
        return unjudged(self._mesh, self._config, key, holders)

    def moments(self, key: TraceKey) -> tuple[Entry, Moments] | None:
        """One entry and the moments of a parameter's initial values; of replicas the first."""
        parts: dict[tuple[object, ...], Moments] = {}
        entries = self._entries(key)
        for entry in entries:
            region = tuple(box.region for box in entry.boxes)
            if region and (found := Moments.of(entry.sums)).n:
                parts.setdefault(region, found)
        shape = entries[0].logical_shape
        if not self._covers(entries) or sum(part.n for part in parts.values()) != _size(shape):
            return None
        # Not summed from Moments(): the checksum of a whole tensor's is that of its bits.
        return entries[0], functools.reduce(Moments.__add__, parts.values())

    def tensor(self, key: TraceKey) -> torch.Tensor | None:
        """The whole tensor, as a single device has it.

        Returns:
            The tensor; ``None`` where the candidate has not stored it, or not all of it, or in
            parts that do not belong together.
        """
        entries = self._entries(key)
        first = entries[0]
        if any(one.misfit or not one.file for one in entries) or not self._covers(entries):
            return None
        whole = torch.zeros(first.logical_shape, dtype=getattr(torch, first.dtype))
        if first.partial_over:
            # As the judge does: ranks with the same part of a sum's terms hold these terms.
            regions = {tuple(box.region for box in one.boxes) for one in entries}
            if len(regions) != 1:
                return None
            total = torch.zeros(first.logical_shape, dtype=torch.float64)
            for one in entries:
                self._put(one, total, add=True)
            return total.to(whole.dtype)
        for one in reversed(entries):
            self._put(one, whole, add=False)
        return whole

    def _put(self, entry: Entry, whole: torch.Tensor, *, add: bool) -> None:
        local = self._candidate.tensor(entry)
        for box in entry.boxes:
            part = local_view(local, box)
            if entry.factor != 1.0:
                part = part.double() / entry.factor
            there = logical_view(whole, box)
            if add:
                there.add_(part)
            else:
                there.copy_(part)

    @staticmethod
    def _covers(entries: list[Entry]) -> bool:
        shape = entries[0].logical_shape
        return all(one.logical_shape == shape for one in entries) and (
            coverage(shape, [box for one in entries for box in one.boxes]).complete
        )


def _size(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)
