# SPDX-License-Identifier: Apache-2.0
"""Measure a saved candidate as its ranks did in the running job, one rank after the other.

An index is checked before it is used. One that contradicts itself or the stored data is an error:
a damaged trace must be neither equivalent nor diverged.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.device import compare, decided_only, with_share
from megatron_ttrace.compare.experts import Match
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace import counted
from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.counted import Counted
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.moments import Moments
from megatron_ttrace.trace.records import FLOW, Kind
from megatron_ttrace.trace.sanitise import clean
from megatron_ttrace.trace.store import Entry, TraceReader, meta_as

MOST_CELLS = 1 << 24
"""Cells that the boxes of one rank may cut a tensor into; real ones have a few thousand."""
MOST_DIMS = 8


def measure_saved(
    reference: TraceReader, candidate: TraceReader, tolerances: Tolerances | None = None
) -> dict[int, list[Measured]]:
    """The findings of every rank of a saved candidate.

    Without ``tolerances`` a failure is never taken for a summand.

    Raises:
        TTraceError: when an index contradicts itself or the stored tensors.
    """
    for rank, entries in reference.ranks.items():
        for number, entry in enumerate(entries):
            if entry.key.kind is Kind.INITIAL:
                with _line(reference, rank, number):
                    _moments(entry)
    alike = Counter(_part(entry) for entries in candidate.ranks.values() for entry in entries)
    measured: dict[int, list[Measured]] = {rank: [] for rank in candidate.ranks}
    for rank, entries in candidate.ranks.items():
        for number, entry in enumerate(entries):
            with _line(candidate, rank, number):
                ranks = alike[_part(entry)]
                measured[rank].append(_measure(reference, candidate, entry, ranks, tolerances))
    return measured


def _part(entry: Entry) -> tuple[object, ...]:
    """The elements of a tensor that an entry holds."""
    return entry.key, *(box.region for box in entry.boxes)


def epsilon_of(trace: TraceReader) -> float:
    """Machine epsilon of a run's compute dtype. Raises ``TTraceError`` when it is not known."""
    if not trace.reference.epsilon:
        raise TTraceError(f"{trace.directory}/meta.json has no epsilon: run the traced job again")
    return trace.reference.epsilon


def meshes_of(candidate: TraceReader) -> tuple[Mesh, ...]:
    """The meshes of all ranks of a saved candidate, each of which has an index.

    Raises:
        TTraceError: when they contradict each other, or a rank's index is missing.
    """
    meshes = candidate.candidate.meshes
    if not meshes or sorted(candidate.ranks) != list(range(len(meshes))):
        raise TTraceError(
            f"{candidate.directory} holds the tensors of {len(candidate.ranks)} of {len(meshes)} "
            "ranks: collect the files of all ranks in one directory"
        )
    return meshes


def config_of(candidate: TraceReader) -> RunConfig:
    """The configuration of a saved candidate. Raises ``TTraceError`` when it is not understood."""
    return meta_as(RunConfig, candidate.directory, candidate.candidate.config)


def counts_of(candidate: TraceReader) -> dict[int, tuple[Counted, ...]]:
    """What each rank of a saved candidate counted; empty for one of an older version.

    Raises:
        TTraceError: when it contradicts itself.
    """
    try:
        return dict(enumerate(map(counted.decode, candidate.candidate.counted)))
    except CodecError as error:
        raise TTraceError(
            f"{candidate.directory}/meta.json is damaged ({error.inside('counted')}): run the "
            "traced job again"
        ) from error


@contextmanager
def _line(trace: TraceReader, rank: int, number: int) -> Iterator[None]:
    """Name the line of the index that an error is about."""
    try:
        yield
    except (CodecError, RuntimeError) as error:
        # RuntimeError: what torch says of sizes beyond its own limits.
        reason = clean(str(error).partition("\n")[0], 200)
        raise TTraceError(
            f"{trace.directory}/rank-{rank:05d}.index.jsonl:{number + 1} is damaged ({reason}): "
            "run the traced job again"
        ) from error


def _measure(
    reference: TraceReader,
    candidate: TraceReader,
    entry: Entry,
    ranks: int,
    tolerances: Tolerances | None,
) -> Measured:
    """The finding about an entry; ``ranks`` have the same elements."""
    key = entry.key
    if key.kind is Kind.INITIAL:
        moments = _moments(entry)
        return Measured(
            key, entry.placement, entry.boxes, entry.logical_shape, None, moments=moments
        )
    if key not in reference:
        return Measured.stranger(key, entry.shape)
    there = reference.entry(key)
    misfit = functools.partial(Measured.misfit, key, entry.logical_shape)
    if entry.misfit:
        return misfit(entry.misfit)
    if there.shape != entry.logical_shape:
        return misfit(f"the whole tensor is {entry.logical_shape}, in the reference {there.shape}")
    _check(entry)
    where = key, entry.placement, entry.boxes, there.shape
    copies = ranks if key.kind in FLOW else 1
    match = Match(*where, entry.factor, entry.partial_over, partial_ranks=ranks, copies=copies)
    if entry.sums:
        sums = Sums.of(entry.sums)
        # Sums over no element would pass, whatever the tensor was.
        if sums.n == 0 and _elements(entry.boxes):
            raise CodecError(f"sums: of {sums.n} elements in {_elements(entry.boxes)}")
        return Measured(*where, sums)
    local, logical = _tensor(candidate, entry), _tensor(reference, there)
    if local.is_floating_point() != logical.is_floating_point():
        return misfit(f"{entry.dtype}, in the reference {there.dtype}")
    measured = compare(reference, match, local)
    if tolerances is None:
        return measured
    measured = decided_only(measured, match, local, reference, tolerances)
    return with_share(measured, match, local, logical, tolerances)


def _tensor(trace: TraceReader, entry: Entry) -> torch.Tensor:
    """The stored tensor, which must have the shape that the index says."""
    data = trace.tensor(entry)
    if tuple(data.shape) != entry.shape:
        raise CodecError(
            f"{entry.key}: stored are {list(data.shape)}, the index says {list(entry.shape)}"
        )
    return data


def _moments(entry: Entry) -> Moments:
    """The moments of a parameter's initial values; numbers that belong to some values."""
    _check(entry)
    moments = Moments.of(entry.sums)
    if moments.n and not moments.nonfinite:
        numbers = dataclasses.astuple(moments)[1:8]  # from the sum to the largest value
        if not max(map(abs, numbers)) < 1e60 or moments.least > moments.most:
            raise CodecError("sums: not valid moments")
        if not moments.is_constant and not moments.scatter > 0.0:
            raise CodecError("sums: values differ, and have no variance")
    return moments


def _elements(boxes: tuple[Box, ...]) -> int:
    return sum(box.numel for box in boxes)


def _check(entry: Entry) -> None:
    """Refuse what the judge could not count, or would count twice.

    Raises:
        CodecError: for a shape or boxes that no tensor has.
    """
    whole, boxes = entry.logical_shape, entry.boxes
    if len(whole) > MOST_DIMS or math.prod(whole) >= 1 << 63:
        raise CodecError("logical_shape: no tensor is this large")
    borders = (
        {0, size, *(edge for b in boxes for edge in (b.logical[d], b.logical[d] + b.extent[d]))}
        for d, size in enumerate(whole)
    )
    if math.prod(map(len, borders)) > MOST_CELLS:
        raise CodecError(f"boxes: {len(boxes)} boxes are too many")
    if entry.sums:
        return
    if not 0 < entry.factor < 1e30:
        raise CodecError(f"factor: expected a positive number, got {entry.factor}")
    size = math.prod(entry.shape)
    if _elements(boxes) > size:
        raise CodecError(f"boxes: they hold {_elements(boxes)} of {size} elements")
