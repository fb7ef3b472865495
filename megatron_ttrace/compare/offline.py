# SPDX-License-Identifier: Apache-2.0
"""Measure a saved candidate: what each rank did in the running job, one rank after the other."""

from __future__ import annotations

from megatron_ttrace.compare.measure import measure
from megatron_ttrace.compare.sinks import Measured
from megatron_ttrace.trace.store import Entry, TraceReader


def measure_saved(reference: TraceReader, candidate: TraceReader) -> dict[int, list[Measured]]:
    """The findings of every rank of a saved candidate."""
    return {
        rank: [
            _measure(reference, candidate, candidate.resolve(rank, number))
            for number in range(len(entries))
        ]
        for rank, entries in candidate.ranks.items()
    }


def _measure(reference: TraceReader, candidate: TraceReader, entry: Entry) -> Measured:
    key = entry.key
    if key not in reference:
        note = "not in the reference"
        return Measured(key, "", (), entry.shape, None, "extra", note)
    there = reference.entry(key)
    if entry.misfit:
        return Measured(key, "", (), there.shape, None, "shape", entry.misfit)
    if there.shape != entry.logical_shape:
        note = f"the whole tensor is {entry.logical_shape}, in the reference {there.shape}"
        return Measured(key, entry.placement, (), there.shape, None, "shape", note)
    sums = measure(candidate.tensor(entry), reference.tensor(there), entry.boxes, entry.factor)
    return Measured(key, entry.placement, entry.boxes, there.shape, sums)
