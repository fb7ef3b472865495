# SPDX-License-Identifier: Apache-2.0
"""Time and size of one rank's plan in worlds of 64, 1,024 and 16,384 ranks.

    python -m tests.placement.scale

prints the numbers of docs/scaling.md. Time is processor time, the median of nine. What Megatron
knows anyway (ranges of buckets, which tokens arrived) is made before; the plan is everything from a
local shape to the encoded boxes.
"""

import itertools
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from megatron_ttrace.compare import wire
from megatron_ttrace.compare.gathered import of_rank
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.placement.infer import infer_activation
from megatron_ttrace.placement.plan import describe, plan
from megatron_ttrace.placement.token_index import expert_boxes, match
from megatron_ttrace.trace.budget import shown
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


def planners(job: Job, rank: int) -> dict[str, Planner]:
    """What a rank does to plan what it holds in one step, by kind of tensor."""
    mesh = job.mesh(rank)
    chunks = job.chunks[mesh.at("pp")]
    held, owned = [], []
    for chunk in chunks:
        dense, experts = list(job.dense(chunk)), list(job.of_experts(chunk, mesh.at("ep")))
        held += dense + experts
        shard = mesh.at("dp") * job.cp + mesh.at("cp")
        owned += Zero.of(dense, job, job.dp * job.cp).ranges(shard)
        if experts:
            owned += Zero.of(experts, job, job.edp).ranges(mesh.at("edp"))
    captured = [activation for chunk in chunks for activation in activations(chunk, job)]
    layers = [layer for chunk in chunks for layer in chunk.layers if layer]
    sent = dispatch(job, mesh.at("edp"))
    arrived = sent.here[mesh.at("ep")]

    def parameter(kind: Kind, at: ParameterPlace) -> Measured:
        key = TraceKey(0, STEP_LEVEL, kind, at.name, 0)
        return Measured(key, describe(at.placement), at.boxes(mesh), at.logical_shape, None)

    def parameters() -> list[Measured]:
        return [parameter(Kind.PARAM, place(local, mesh)) for local in held]

    def states() -> list[Measured]:
        parts = [place(local, mesh).flat(start, end) for local, start, end in owned]
        return [parameter(kind, at) for at in parts for kind in STATES]

    def modules() -> list[Measured]:
        measured = []
        for name, side, dims, blocks in captured:
            whole = tuple(size for size, _ in dims)
            local = tuple(size // math.prod(map(mesh.size, axes)) for size, axes in dims)
            placement = infer_activation(local, whole, mesh, seq_length=SEQUENCE, blocks=blocks)
            boxes = plan(whole, placement, mesh)
            for kind in SIDES[side]:
                key = TraceKey(0, mesh.at("dp"), kind, name, 0)
                measured.append(Measured(key, describe(placement), boxes, whole, None))
        return measured

    def experts() -> list[Measured]:
        measured = []
        for layer, (microbatch, known) in itertools.product(layers, sent.there.items()):
            rows, strangers = match(arrived, known, microbatch)
            assert not strangers
            for module, side, size in MODULES:
                blocks = 2 if module == "linear_fc1" and side == "output" else 1
                local = len(arrived.expert), size // job.etp if size != HIDDEN else size
                whole = len(known.expert), size
                words, boxes = expert_boxes(rows, local, whole, mesh, blocks)
                name = f"decoder.layers.{layer}.mlp.experts.{module}".rstrip(".")
                for kind in SIDES[side]:
                    key = TraceKey(0, microbatch, kind, name, 0)
                    measured.append(Measured(key, words, boxes, whole, None))
        return measured

    return {
        "parameters": parameters,
        "activations": modules,
        "rows of experts": experts,
        "states": states,
    }


def encoded(measured: list[Measured]) -> str:
    """As a rank sends them."""
    return json.dumps(wire.encode(of_rank(0, measured)))


def boxes_of(measured: list[Measured]) -> int:
    """Number of all tensors' boxes."""
    return sum(len(tensor.boxes) for tensor in measured)


def reference(job: Job) -> int:
    """Bytes of the parameters in the reference (bf16, before and after) and of their states."""
    chunks = [chunk for stage in job.chunks.values() for chunk in stage]
    locals_ = [local for chunk in chunks for local in job.dense(chunk)]
    for chunk in chunks:
        locals_ += (local for ep in range(job.ep) for local in job.of_experts(chunk, ep))
    return (2 * 2 + 4 * len(STATES)) * sum(math.prod(local.whole) for local in locals_)


def main() -> None:
    """Print the table, and the size of a reference."""
    print("| ranks | | tensors | boxes | bytes | time |")
    print("|---|---|---|---|---|---|")
    plans = {job: planners(job, 0) for job in JOBS}
    times: dict[tuple[Job, str], list[float]] = defaultdict(list)
    for _ in range(9):
        for job, kinds in plans.items():
            for kind, made in kinds.items():
                began = time.process_time()
                encoded(made())
                times[job, kind].append(time.process_time() - began)
    for job, kinds in plans.items():
        for kind, made in kinds.items():
            measured, spent = made(), statistics.median(times[job, kind])
            print(
                f"| {job.world:,} | {kind} | {len(measured)} | {boxes_of(measured):,} | "
                f"{len(encoded(measured)):,} | {spent * 1000:.1f} ms |"
            )
    for job in JOBS:
        print(f"{job.world:,} ranks: a reference of {shown(reference(job))}")


if __name__ == "__main__":
    main()
