# SPDX-License-Identifier: Apache-2.0
"""A saved run of two tensor-parallel ranks, made by hand: a reference and a candidate."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_ttrace.compare.moved import Moved, write_moves
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal
from tests.placement.meshes import mesh_of

Part = Callable[[Place, torch.Tensor, int], torch.Tensor]
"""From a place and the right part of its tensor to what a rank has."""


def save(
    home: Path,
    tensors: Mapping[Place, torch.Tensor],
    moved: Mapping[Place, float],
    *,
    part_of: Part,
    whole: Collection[Place] = (),
    partial: Collection[Place] = (),
    entries: Collection[Entry] = (),
    config: Mapping[str, Any],
) -> None:
    """Write ``home/reference`` and ``home/candidate``.

    Args:
        home: the directory.
        tensors: of the reference. Ranks hold halves of their first dimension.
        moved: how far the replays moved a tensor: four times this is its tolerance.
        part_of: what ranks hold.
        whole: places of which each rank holds everything.
        partial: those of which each rank holds a summand.
        entries: more entries of both traces.
        config: of the candidate.
    """
    writer = TraceWriter(home / "reference", 0)
    sink = WriteSink(writer, 1)
    for place, data in tensors.items():
        sink.tensor((place,), data)
    for entry in entries:
        writer.add(entry, None)
    writer.close()
    norms = {place: float(tensors[place].double().norm()) for place in moved}
    moves = {
        TraceKey(1, *place): Moved(tensors[place].numel(), norms[place], (move,))
        for place, move in moved.items()
    }
    write_moves(home / "reference", moves)
    meta = {"role": "reference", "epsilon": 2.0**-7, "microbatches": 1}
    seal(home / "reference", meta)
    reference = TraceReader(home / "reference")
    meshes = [mesh_of(rank, 2, tp=2) for rank in range(2)]
    for rank, mesh in enumerate(meshes):
        writer = TraceWriter(home / "candidate", rank)
        sums = dict.fromkeys(partial, "tp")
        layout = RankLayout(mesh, 16, 2.0, partials=sums)
        compare = CompareSink(reference, 1, layout, writer=writer, keep_all=True)
        for place, data in tensors.items():
            part = data if place in {*whole, *partial} else data.chunk(2)[rank]
            part = part_of(place, part, rank)
            if place[1] in (Kind.MAIN_GRAD, Kind.PARAM):
                compare.placed(place, part.clone(), data.shape, (Step("tp", Shard(0)),))
            else:
                compare.tensor((place,), part)
        for entry in entries:
            writer.add(entry, None)
        writer.close()
    encoded = [codec.encode(dataclasses.asdict(mesh)) for mesh in meshes]
    meta = {"role": "candidate", "complete": True, "config": dict(config), "meshes": encoded}
    seal(home / "candidate", meta)
