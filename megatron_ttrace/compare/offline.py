# SPDX-License-Identifier: Apache-2.0
"""Measure a saved candidate: what each rank did in the running job, one rank after the other."""

from __future__ import annotations

import dataclasses

from megatron_ttrace.compare.measure import Sums, measure
from megatron_ttrace.compare.moments import Moments
from megatron_ttrace.compare.sinks import Measured
from megatron_ttrace.compare.sketch import sketch_of_share
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.partial import axis_of_summand
from megatron_ttrace.records import Kind
from megatron_ttrace.trace.store import Entry, TraceReader


def measure_saved(reference: TraceReader, candidate: TraceReader) -> dict[int, list[Measured]]:
    """The findings of every rank of a saved candidate."""
    return {
        rank: [
            _measure(reference, candidate, candidate.resolve(rank, number), rank)
            for number in range(len(entries))
        ]
        for rank, entries in candidate.ranks.items()
    }


def _measure(reference: TraceReader, candidate: TraceReader, entry: Entry, rank: int) -> Measured:
    key = entry.key
    if key.kind is Kind.INITIAL:
        moments = Moments.of(entry.sums)
        return Measured(
            key, entry.placement, entry.boxes, entry.logical_shape, None, moments=moments
        )
    if key not in reference:
        note = "not in the reference"
        return Measured(key, "", (), entry.shape, None, "extra", note)
    there = reference.entry(key)
    if entry.misfit:
        return Measured(key, "", (), there.shape, None, "shape", entry.misfit)
    if there.shape != entry.logical_shape:
        note = f"the whole tensor is {entry.logical_shape}, in the reference {there.shape}"
        return Measured(key, entry.placement, (), there.shape, None, "shape", note)
    if entry.sums:
        return Measured(key, entry.placement, entry.boxes, there.shape, Sums.of(entry.sums))
    local, logical = candidate.tensor(entry), reference.tensor(there)
    sums = measure(local, logical, entry.boxes, entry.factor)
    found = Measured(key, entry.placement, entry.boxes, there.shape, sums)
    axis = axis_of_summand(entry.placement)
    if axis is None:
        return found
    ranks = Mesh.from_dict(candidate.meta["meshes"][rank]).size(axis)
    share = sketch_of_share(local, logical, entry.boxes, entry.factor, ranks)
    return dataclasses.replace(found, sketch=share)
