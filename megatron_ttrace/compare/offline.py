# SPDX-License-Identifier: Apache-2.0
"""Measure a saved candidate: what each rank did in the running job, one rank after the other.

Whatever an index says is checked before it is used. What contradicts itself or the stored data is
an error and no finding: a damaged trace must be neither equivalent nor diverged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ttrace.compare.measure import Sums, measure
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.moments import Moments
from megatron_ttrace.compare.sketch import sketch_of_share
from megatron_ttrace.compare.wire import moments_of, sums_of
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import AXES, Mesh
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import Count
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.sanitise import clean
from megatron_ttrace.trace.store import Entry, TraceReader

MOST_CELLS = 1 << 24
"""Cells that the boxes of one rank may cut a tensor into; real ones have a few thousand."""
MOST_DIMS = 8

_Shape = tuple[Count, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Line:
    """What of an index line is calculated with."""

    shape: _Shape
    logical_shape: _Shape
    boxes: tuple[Box, ...]
    placement: str
    dtype: str
    file: str
    tensor: str
    misfit: str


def measure_saved(reference: TraceReader, candidate: TraceReader) -> dict[int, list[Measured]]:
    """The findings of every rank of a saved candidate.

    Raises:
        TTraceError: when an index contradicts itself or the stored tensors.
    """
    for rank, entries in reference.ranks.items():
        for number, entry in enumerate(entries):
            with _told(reference, rank, number):
                _check_types(entry)
                if entry.key.kind is Kind.INITIAL:
                    _moments(entry)
    found: dict[int, list[Measured]] = {}
    for rank, entries in candidate.ranks.items():
        found[rank] = []
        for number in range(len(entries)):
            with _told(candidate, rank, number):
                found[rank].append(
                    _measure(reference, candidate, candidate.resolve(rank, number), rank)
                )
    return found


def epsilon_of(trace: TraceReader) -> float:
    """Machine epsilon of a run's compute dtype.

    Raises:
        TTraceError: when the trace has none that a dtype has.
    """
    found = trace.meta.get("epsilon")
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < 1:
        raise TTraceError(
            f"{trace.directory}/meta.json is damaged (epsilon: expected a number between 0 and 1, "
            f"got {codec.shown(found)}): run the traced job again"
        )
    return float(found)


def meshes_of(candidate: TraceReader) -> list[Mesh]:
    """The places of all ranks of a saved candidate, each of which has an index.

    Raises:
        TTraceError: when they contradict each other, or a rank's index is missing.
    """
    where = f"{candidate.directory}/meta.json"
    try:
        meshes = codec.decode(tuple[Mesh, ...], candidate.meta.get("meshes"))
        for rank, mesh in enumerate(meshes):
            if reason := _contradiction(mesh, rank, len(meshes)):
                raise codec.CodecError(reason, f"meshes[{rank}]")
    except codec.CodecError as error:
        raise TTraceError(f"{where} is damaged ({error}): run the traced job again") from error
    if not meshes or sorted(candidate.ranks) != list(range(len(meshes))):
        raise TTraceError(
            f"{candidate.directory} holds the tensors of {len(candidate.ranks)} of {len(meshes)} "
            "ranks: collect the files of all ranks in one directory"
        )
    return list(meshes)


def _contradiction(mesh: Mesh, rank: int, world_size: int) -> str:
    if mesh.rank != rank or mesh.world_size != world_size:
        return f"expected rank {rank} of {world_size}"
    if not len(mesh.sizes) == len(mesh.coordinates) == len(AXES):
        return f"expected {len(AXES)} sizes and coordinates"
    if any(not 1 <= size <= world_size for size in mesh.sizes) or mesh.vpp < 1:
        return f"expected sizes from 1 to {world_size}"
    inside = all(0 <= at < size for at, size in zip(mesh.coordinates, mesh.sizes, strict=True))
    return "" if inside else "a coordinate is outside of its axis"


@contextmanager
def _told(trace: TraceReader, rank: int, number: int) -> Iterator[None]:
    """Name the line of the index that an error is about."""
    try:
        yield
    except (codec.CodecError, RuntimeError) as error:
        # RuntimeError: what torch says of sizes beyond its own limits.
        reason = clean(str(error).partition("\n")[0], 200)
        raise TTraceError(
            f"{trace.directory}/rank-{rank:05d}.index.jsonl:{number + 1} is damaged ({reason}): "
            "run the traced job again"
        ) from error


def _measure(reference: TraceReader, candidate: TraceReader, entry: Entry, rank: int) -> Measured:
    key = entry.key
    _check_types(entry)
    if key.kind is Kind.INITIAL:
        moments = _moments(entry)
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
    _check_logical(entry)
    if entry.sums:
        sums = sums_of(entry.sums)
        _check_sums(sums, entry)
        return Measured(key, entry.placement, entry.boxes, there.shape, sums)
    _check_local(entry)
    local, logical = _tensor(candidate, entry), _tensor(reference, there)
    if local.is_floating_point() != logical.is_floating_point():
        note = f"{entry.dtype}, in the reference {there.dtype}"
        return Measured(key, entry.placement, (), there.shape, None, "shape", note)
    sums = measure(local, logical, entry.boxes, entry.factor)
    found = Measured(key, entry.placement, entry.boxes, there.shape, sums)
    axis = entry.partial_over
    if not axis:
        return found
    ranks = meshes_of(candidate)[rank].size(axis)
    share = sketch_of_share(local, logical, entry.boxes, entry.factor, ranks)
    return dataclasses.replace(found, sketch=share, partial_over=axis)


def _check_types(entry: Entry) -> None:
    """Nothing but integers is calculated with. Raises ``CodecError``."""
    codec.decode(_Line, {name: getattr(entry, name) for name in _Line.__slots__})
    codec.decode(TraceKey, codec.encode(entry.key))


def _tensor(trace: TraceReader, entry: Entry) -> torch.Tensor:
    """The stored tensor, which must be the one that the index describes."""
    data = trace.tensor(entry)
    stored = str(data.dtype).removeprefix("torch.")
    if tuple(data.shape) != entry.shape or stored != entry.dtype:
        raise codec.CodecError(
            f"{entry.key}: stored are {list(data.shape)} {stored}, "
            f"the index says {list(entry.shape)} {codec.shown(entry.dtype)}"
        )
    return data


def _moments(entry: Entry) -> Moments:
    """The moments of a parameter's initial values; numbers that belong to some values."""
    _check_logical(entry)
    found = moments_of(entry.sums)
    numbers = found.sum, found.squares, found.cubes, found.fourths, found.least, found.most
    if found.n and not found.nonfinite:
        large = max(map(abs, numbers))
        if not large < 1e60 or found.least > found.most:
            raise codec.CodecError("sums: not valid moments")
        if not found.is_constant and not found.scatter > 0.0:
            raise codec.CodecError("sums: values differ, and have no variance")
    return found


def _check_sums(sums: Sums, entry: Entry) -> None:
    """Sums over no element would pass, whatever the tensor was."""
    if (sums.n == 0) != (_elements(entry.boxes) == 0):
        raise codec.CodecError(f"sums: of {sums.n} elements in {_elements(entry.boxes)}")


def _elements(boxes: tuple[Box, ...]) -> int:
    return sum(box.numel for box in boxes)


def _check_logical(entry: Entry) -> None:
    """Every box lies inside of the whole tensor, and they are few enough to be counted.

    Raises:
        CodecError: when that is not so.
    """
    whole = entry.logical_shape
    if len(whole) > MOST_DIMS or math.prod(whole) >= 1 << 63:
        raise codec.CodecError(f"logical_shape: no tensor has the shape {_some(whole)}")
    for number, box in enumerate(entry.boxes):
        inside = len(box.logical) == len(box.extent) == len(whole) and all(
            start >= 0 and size >= 0 and start + size <= limit
            for start, size, limit in zip(box.logical, box.extent, whole, strict=True)
        )
        if not inside:
            raise codec.CodecError(
                f"boxes[{number}]: {_some(box.logical)} and {_some(box.extent)} more leave "
                f"the tensor of shape {_some(whole)}"
            )
    cells = math.prod(len({0, size, *_borders(entry.boxes, dim)}) for dim, size in enumerate(whole))
    if cells > MOST_CELLS:
        raise codec.CodecError(f"boxes: {len(entry.boxes)} boxes are too many")


def _borders(boxes: tuple[Box, ...], dim: int) -> Iterator[int]:
    for box in boxes:
        yield box.logical[dim]
        yield box.logical[dim] + box.extent[dim]


def _check_local(entry: Entry) -> None:
    """Every box lies inside of what the rank stored, and no element is there twice.

    Raises:
        CodecError: when that is not so.
    """
    factor: Any = entry.factor
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e30:
        raise codec.CodecError(f"factor: expected a positive number, got {codec.shown(factor)}")
    shape, size = entry.shape, math.prod(entry.shape)
    for number, box in enumerate(entry.boxes):
        if box.is_flat:
            inside = len(box.local) == 1 and 0 <= box.local[0] <= size - box.numel
        else:
            inside = len(box.local) == len(shape) and all(
                start >= 0 and start + length <= limit
                for start, length, limit in zip(box.local, box.extent, shape, strict=True)
            )
        if not inside:
            raise codec.CodecError(
                f"boxes[{number}]: {_some(box.extent)} from {_some(box.local)} leave "
                f"the stored tensor of shape {_some(shape)}"
            )
    if _elements(entry.boxes) > size:
        raise codec.CodecError(f"boxes: they hold {_elements(entry.boxes)} of {size} elements")


def _some(numbers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, numbers[:MOST_DIMS]))}{', ...' * (len(numbers) > MOST_DIMS)}]"
