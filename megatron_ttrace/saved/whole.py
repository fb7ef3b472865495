# SPDX-License-Identifier: Apache-2.0
"""The shards of a run's ranks, put together to whole tensors: its trace can then be a reference."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch

from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.offline import config_of, meshes_of
from megatron_ttrace.placement.coverage import coverage
from megatron_ttrace.saved.conclusion import unjudged
from megatron_ttrace.trace.moments import Moments
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader
from megatron_ttrace.trace.views import box_views, same_bits


class Tensors[K]:
    """The logical tensors of a run whose ranks stored their parts, by what ``key_of`` gives."""

    def __init__(self, trace: TraceReader, key_of: Callable[[TraceKey], K]) -> None:
        self._trace = trace
        self._held: dict[K, list[tuple[int, int]]] = {}
        for rank, entries in trace.ranks.items():
            for number, entry in enumerate(entries):
                self._held.setdefault(key_of(entry.key), []).append((rank, number))

    def __iter__(self) -> Iterator[K]:
        """All keys, rank by rank."""
        return iter(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def holders(self, key: K) -> list[tuple[int, int]]:
        """The ranks that have a part of a tensor, each with the number of its line."""
        return self._held[key]

    def entries(self, key: K) -> list[tuple[int, Entry]]:
        """The same, each with its line."""
        return [(rank, self._trace.ranks[rank][number]) for rank, number in self._held[key]]

    def initial(self, key: K) -> Entry | None:
        """A parameter's initial values as a single device has them; of replicas the first's."""
        parts: dict[tuple[object, ...], Moments] = {}
        entries = [entry for _, entry in self.entries(key)]
        for entry in entries:
            region = tuple(box.region for box in entry.boxes)
            if region and (moments := Moments.of(entry.sums)).n:
                parts.setdefault(region, moments)
        shape = entries[0].logical_shape
        if not self._covers(entries) or sum(part.n for part in parts.values()) != math.prod(shape):
            return None
        # Not summed from Moments(): the checksum of a whole tensor's is that of its bits.
        sums = dataclasses.astuple(functools.reduce(Moments.__add__, parts.values()))
        return Entry(entries[0].key, shape, entries[0].dtype, sums=sums)

    def tensor(self, key: K) -> torch.Tensor | None:
        """The whole tensor, as a single device has it.

        Returns:
            The tensor; ``None`` where the candidate has not stored it, or not all of it, or in
            parts that do not belong together.
        """
        entries = [entry for _, entry in self.entries(key)]
        first = entries[0]
        if any(entry.misfit or not entry.file for entry in entries) or not self._covers(entries):
            return None
        whole = torch.zeros(first.logical_shape, dtype=getattr(torch, first.dtype))
        if first.partial_over:
            # As the judge does: ranks with the same elements hold the terms of their sum.
            regions = {box.region for entry in entries for box in entry.boxes}
            if sum(math.prod(extent) for _, extent in regions) != math.prod(first.logical_shape):
                return None
            total = torch.zeros(first.logical_shape, dtype=torch.float64)
            for entry in entries:
                for part, target in self._pairs(entry, total):
                    target.add_(part)
            return total.to(whole.dtype)
        for entry in reversed(entries):
            for part, target in self._pairs(entry, whole):
                target.copy_(part)
        return whole

    def _pairs(
        self, entry: Entry, whole: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each box of a rank's tensor the values of a single device, and their place."""
        local = self._trace.tensor(entry)
        for shard, target in box_views(local, whole, entry.boxes):
            part = shard if entry.factor == 1.0 else shard.double() / entry.factor
            yield part, target

    def conflicting(self, key: K, whole: torch.Tensor) -> list[int]:
        """The ranks whose part of a tensor is not that of ``whole``, to the bit.

        What is summed over an axis is not anyone's part.
        """
        ranks = []
        for rank, entry in self.entries(key):
            for ours, right in () if entry.partial_over else self._pairs(entry, whole):
                # What was divided by a factor is wider.
                ours = ours.to(right.dtype) if ours.dtype is torch.float64 else ours
                if not same_bits(ours, right):
                    ranks.append(rank)
                    break
        return ranks

    @staticmethod
    def _covers(entries: list[Entry]) -> bool:
        shape = entries[0].logical_shape
        return all(entry.logical_shape == shape for entry in entries) and (
            coverage(shape, [box for entry in entries for box in entry.boxes]).complete
        )


class Shards(Tensors[TraceKey]):
    """The logical tensors of a run by their keys."""

    def __init__(self, trace: TraceReader) -> None:
        super().__init__(trace, lambda key: key)


class WholeTensors(Shards):
    """The logical tensors of a saved candidate."""

    def __init__(self, candidate: TraceReader) -> None:
        """Read which rank holds what. Raises ``TTraceError`` when ranks are missing."""
        super().__init__(candidate)
        self._mesh = meshes_of(candidate)[0]
        self._config = config_of(candidate)

    def is_judged_by_sums(self, key: TraceKey) -> bool:
        """Whether sums were kept instead of the tensor."""
        return all(entry.sums for _, entry in self.entries(key))

    def unjudged(self, key: TraceKey) -> Reason | None:
        """Why the tensor is not a single device's by design, in this layout."""
        holders = [
            Measured(key, entry.placement, entry.boxes, entry.logical_shape, None)
            for _, entry in self.entries(key)
        ]
        return unjudged(self._mesh, self._config, (), key, holders)
