# SPDX-License-Identifier: Apache-2.0
"""Small references, as capture writes them, and their tolerances."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron_ttrace.compare.moved import Moved
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal


def step_level(kind: Kind, name: str, index: int = 0) -> Place:
    """The place of a tensor that belongs to the whole step."""
    return STEP_LEVEL, kind, name, index


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[WriteSink]:
    """Where iteration 1 of a reference is captured; afterwards the trace is complete."""
    writer = TraceWriter(directory, 0)
    yield WriteSink(writer, 1)
    writer.close()
    seal(directory, {"role": "reference"})


def reference_of(
    directory: Path,
    tensors: Mapping[Place, torch.Tensor],
    others: Mapping[Place, Sequence[Place]] | None = None,
) -> TraceReader:
    """A reference with these tensors, some of which have other places too."""
    with writing(directory) as sink:
        for place, data in tensors.items():
            sink.tensor((place, *(others or {}).get(place, ())), data)
    return TraceReader(directory)


def tolerances_of(
    reference: TraceReader,
    moved: float = 0.0025,
    moves: Mapping[Place, float] | None = None,
    replays: int = 1,
) -> Tolerances:
    """Replays moved every tensor so far, or as ``moves`` says; the safety factor is 4."""
    found, dtypes = {}, {}
    for key in reference:
        entry = reference.entry(key)
        place = key.microbatch, key.kind, key.name, key.index
        data = torch.nan_to_num(reference.tensor(entry).double(), 0.0, 0.0, 0.0)
        move = (moves or {}).get(place, moved)
        found[key] = Moved(data.numel(), float(data.norm()), (move,) * replays)
        dtypes[key] = entry.dtype
    return Tolerances(found, dtypes)


def key_of(place: Place) -> TraceKey:
    """The key of a place in iteration 1."""
    return TraceKey(1, *place)
