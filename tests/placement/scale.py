# SPDX-License-Identifier: Apache-2.0
"""Time and size of one rank's plan in worlds of 64, 1,024 and 16,384 ranks.

    python -m tests.placement.scale

prints the table of docs/scaling.md. Time is processor time, the median of nine. What Megatron knows
anyway (ranges of buckets, which tokens arrived) is made before; the plan is everything from a local
shape to the encoded boxes.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable

from megatron_ttrace.compare import wire
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.infer import infer_activation
from megatron_ttrace.placement.plan import Placements, describe, plan
from megatron_ttrace.placement.token_index import expert_boxes, match
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from tests.placement.routed import dispatch
from tests.placement.trillion import EXPERT, HIDDEN, SEQUENCE, Job, Zero, activations, place

JOBS = [
    Job(tp=8, cp=4, pp=1, dp=2, ep=64),
    Job(tp=8, cp=4, pp=8, dp=4, ep=64),
    Job(tp=8, cp=4, pp=16, dp=32, ep=64),
]
"""64, 1,024 and 16,384 ranks: each with as many layers and experts on a rank as the others."""

STATES = (Kind.MAIN_GRAD, Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
SIDES = {"input": (Kind.INPUT, Kind.GRAD_INPUT), "output": (Kind.OUTPUT, Kind.GRAD_OUTPUT)}
MODULES = [
    ("", "input", HIDDEN),
    ("linear_fc1", "input", HIDDEN),
    ("linear_fc1", "output", 2 * EXPERT),
    ("linear_fc2", "input", EXPERT),
    ("linear_fc2", "output", HIDDEN),
    ("", "output", HIDDEN),
]
"""Modules of experts that are computed together, and the size of their rows."""

Planner = Callable[[], list[Measured]]


def planner(job: Job, rank: int) -> Planner:
    """What a rank of the first stage does to plan all that it holds in one step."""
    mesh = job.mesh(rank)
    assert mesh.at("pp") == 0
    parameters, owned = [], []
    for chunk in job.chunks[0]:
        dense, experts = list(job.dense(chunk)), list(job.of_experts(chunk, mesh.at("ep")))
        parameters += dense + experts
        shard = mesh.at("dp") * job.cp + mesh.at("cp")
        owned += Zero.of(dense, job, job.dp * job.cp).ranges(shard)
        if experts:
            owned += Zero.of(experts, job, job.edp).ranges(mesh.at("edp"))
    captured = [one for chunk in job.chunks[0] for one in activations(chunk, job)]
    layers = [layer for chunk in job.chunks[0] for layer in chunk.layers if layer]
    sent = dispatch(job, edp=mesh.at("edp"), ranks=range(mesh.at("ep"), mesh.at("ep") + 1))
    arrived = sent.here[mesh.at("ep")]
    own = mesh.at("dp")

    def made() -> list[Measured]:
        found: list[Measured] = []

        def add(
            key: tuple[int, Kind, str], words: str, boxes: tuple[Box, ...], shape: tuple[int, ...]
        ) -> None:
            found.append(Measured(TraceKey(0, *key, 0), words, boxes, shape, None))

        def steps(kind: Kind, name: str, shape: tuple[int, ...], placement: Placements) -> None:
            add((STEP_LEVEL, kind, name), describe(placement), plan(shape, placement, mesh), shape)

        places = {one: place(one, mesh) for one in parameters}
        for at in places.values():
            steps(Kind.PARAM, at.name, at.logical_shape, at.placement)
        for one, start, end in owned:
            at = places[one].flat(start, end)
            for kind in STATES:
                steps(kind, at.name, at.logical_shape, at.placement)
        for name, side, dims, blocks in captured:
            whole = tuple(size for size, _ in dims)
            local = tuple(size // math.prod(map(mesh.size, axes)) for size, axes in dims)
            placement = infer_activation(local, whole, mesh, seq_length=SEQUENCE, blocks=blocks)
            boxes = plan(whole, placement, mesh)
            for kind in SIDES[side]:
                add((own, kind, name), describe(placement), boxes, whole)
        for layer in layers:
            for microbatch, known in sent.there.items():
                rows, strangers = match(arrived, known, microbatch)
                assert not strangers
                for module, side, size in MODULES:
                    gated = module == "linear_fc1" and side == "output"
                    within = size // job.etp if module else size
                    local, whole = (
                        (len(arrived.expert), within),
                        (len(known.expert), size),
                    )
                    words, boxes = expert_boxes(rows, local, whole, mesh, gated=gated)
                    name = f"decoder.layers.{layer}.mlp.experts.{module}".rstrip(".")
                    for kind in SIDES[side]:
                        add((microbatch, kind, name), words, boxes, whole)
        return found

    return made


def encoded(found: list[Measured]) -> str:
    """As a rank sends them."""
    return json.dumps(wire.encode(found))


def boxes_by_kind(found: list[Measured]) -> Counter[str]:
    """Number of boxes of parameters, of states and of activations."""
    boxes: Counter[str] = Counter()
    for one in found:
        kind = "states" if one.key.kind in STATES else "activations"
        boxes["parameters" if one.key.kind is Kind.PARAM else kind] += len(one.boxes)
    return boxes


def main() -> None:
    """Print the table."""
    print("| ranks | tensors | boxes: parameters | states | activations | bytes | states | time |")
    print("|---|---|---|---|---|---|---|---|")
    plans = {job: planner(job, 0) for job in JOBS}
    times: dict[Job, list[float]] = {job: [] for job in JOBS}
    for _ in range(9):
        for job, made in plans.items():
            began = time.process_time()
            encoded(made())
            times[job].append(time.process_time() - began)
    for job, made in plans.items():
        found = made()
        states = [one for one in found if one.key.kind in STATES]
        others = [one for one in found if one.key.kind not in STATES]
        boxes = boxes_by_kind(found)
        print(
            f"| {job.world:,} | {len(found)} | {boxes['parameters']} | {boxes['states']} | "
            f"{boxes['activations']} | {len(encoded(others)):,} | {len(encoded(states)):,} | "
            f"{statistics.median(times[job]) * 1000:.0f} ms |"
        )


if __name__ == "__main__":
    main()
