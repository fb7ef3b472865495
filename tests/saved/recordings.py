# SPDX-License-Identifier: Apache-2.0
"""Recorded runs made by hand: the state of one parameter, divided among two ranks."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.saved.recorded import Recorded
from megatron_ttrace.trace.recorded import FOLDER, Code, Point, RankRecord, Step
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, LoadedIndex, TraceKey
from megatron_ttrace.trace.store import Entry, TraceWriter, seal
from tests.placement.meshes import mesh_of

NAME = "decoder.final_layernorm.weight"
PLACES = {
    "main weight": Code("megatron/optimizer.py:1 (save)", "megatron/optimizer.py:2"),
    "param_groups": Code("megatron/optimizer.py:3 (save)", "megatron/optimizer.py:4 (load)"),
    "opt_param_scheduler": Code("megatron/schedule.py:1 (save)", "megatron/schedule.py:2 (load)"),
    "samples": Code("megatron/samplers.py:1 (build)", "megatron/samplers.py:1 (build)"),
}
NUMBERS = {"iteration": 2.0, "consumed_train_samples": 8.0, "param_groups[wd_mult=1].lr": 1e-3}

type Tensors = dict[LoadedIndex, torch.Tensor]


def state() -> Tensors:
    """A parameter of four elements, with its state."""
    return {
        LoadedIndex.WEIGHT: torch.arange(4, dtype=torch.bfloat16),
        LoadedIndex.MAIN: torch.arange(4, dtype=torch.float32),
        LoadedIndex.EXP_AVG: torch.full((4,), 0.5),
    }


def step(iteration: int, **changes: object) -> Step:
    """A step; all runs make the same."""
    made = Step(
        iteration=iteration,
        samples=((f"sample {iteration}",),),
        numbers=NUMBERS | {"iteration": float(iteration - 1)},
        losses={"lm loss": 4.0 / iteration},
        grad_norm=1.0 / iteration,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def run(
    home: Path,
    points: Mapping[Point, Tensors],
    steps: list[Step],
    *,
    numbers: Mapping[str, float] = NUMBERS,
    random: str = "a",
    drawn: str = " later",
    replicas: Tensors | None = None,
    replicated: Point = Point.END,
    name: str = NAME,
    **changes: object,
) -> Recorded:
    """A run of which two ranks have half of each tensor; of replicas at one point, a row each.

    ``drawn``: what the steps add to its random state. ``name``: of the parameter.
    """
    for point, tensors in points.items():
        folder = home / FOLDER / point
        for rank in range(2):
            writer = TraceWriter(folder, rank)
            for index, tensor in tensors.items():
                half = len(tensor) // 2
                local = tensor[rank * half : (rank + 1) * half]
                key = TraceKey(2, STEP_LEVEL, Kind.LOADED, name, index)
                box = Box((rank * half,), (half,), (0,))
                writer.add(
                    Entry.of(key, local, logical_shape=tuple(tensor.shape), boxes=(box,)), local
                )
            for index, rows in (replicas or {}).items() if point is replicated else ():
                key = TraceKey(2, STEP_LEVEL, Kind.LOADED, name, index)
                box = Box((0,), (rows.shape[1],), (0,))
                shape = (rows.shape[1],)
                writer.add(Entry.of(key, rows[rank], logical_shape=shape, boxes=(box,)), rows[rank])
            writer.close()
        seal(folder, {"role": "state"})
    for rank in range(2):
        record = RankRecord(
            mesh=mesh_of(rank, 2, tp=2),
            omitted=(),
            is_exact=True,
            dropout=False,
            samples_by_layout=False,
            numbers={point: dict(numbers) for point in points},
            random={p: {"torch": random + drawn * (p is Point.END)} for p in points},
            steps=tuple(steps),
            described={NAME.rpartition(".")[0]: "megatron/norm.py:1 (sharded_state_dict)"},
            stored={NAME: NAME},
            buckets=(),
            places=PLACES,
        )
        dataclasses.replace(record, **changes).write(home / FOLDER)  # type: ignore[arg-type]
    return Recorded.open(home)


def uninterrupted(home: Path, **changes: object) -> Recorded:
    """Four steps; the state is saved after two."""
    points = {Point.SAVED: state(), Point.END: state()}
    steps = [step(number) for number in range(1, 5)]
    return run(home, points, steps, **changes)  # type: ignore[arg-type]


def restarted(
    home: Path, loaded: Tensors | None = None, end: Tensors | None = None, **changes: object
) -> Recorded:
    """Two steps, from a loaded state."""
    points = {Point.LOADED: loaded or state(), Point.END: end or state()}
    steps = changes.pop("steps", [step(3), step(4)])
    return run(home, points, steps, **changes)  # type: ignore[arg-type]
