# SPDX-License-Identifier: Apache-2.0
"""What a rank of Kimi K2's first stage says apart from its tensors: its counts and collectives."""

import dataclasses
import itertools

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.collectives import (
    Call,
    Group,
    ModuleCode,
    Operation,
    Phase,
    RankLedger,
    Size,
    Sources,
)
from megatron_ttrace.trace.counted import Counted, Counting, Part, Runs, Statistic, Sum, Term
from tests.placement.trillion import ATTENTION, Job, Local, Zero, place

BUCKETS = 4
"""Reductions in which the gradients of a rank's parameters go."""
_PASSES = (Phase.FORWARD, Phase.RECOMPUTATION, Phase.BACKWARD)
_LEAVES = ("self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj")
_LINEAR = (*_LEAVES, "self_attention.linear_proj", "mlp.shared_experts.linear_fc1")


def groups(job: Job, rank: int) -> dict[str, Runs]:
    """The ranks of each of a rank's groups; the first axis varies fastest."""
    mesh = job.mesh(rank)
    stage = job.world // job.pp
    first = mesh.at("pp") * stage
    strides = {"tp": (job.tp, 1), "cp": (job.cp, job.tp), "ep": (job.ep, job.etp)}
    strides |= {"dp": (job.dp, job.tp * job.cp), "edp": (job.edp, job.etp * job.ep)}
    ranks_of: dict[str, Runs] = {"world": ((0, job.world - 1, 1),)}
    for axis, (size, stride) in strides.items():
        start = rank - mesh.at(axis) * stride
        ranks_of[axis] = ((start, start + (size - 1) * stride, stride),)
    ranks_of["dp-cp"] = ((first + mesh.at("tp"), first + stage - job.tp + mesh.at("tp"), job.tp),)
    ranks_of["pp"] = ((rank % stage, job.world - stage + rank % stage, stage),)
    return {axis: runs for axis, runs in ranks_of.items() if runs[0][0] != runs[0][1]}


def ledger(job: Job, rank: int) -> RankLedger:
    """As of one step with sequence parallelism, overlapping reductions, and an all-to-all."""
    ranks_of = groups(job, rank)
    numbers = {axis: number for number, axis in enumerate(ranks_of)}
    calls: list[Call] = []
    sizes: list[tuple[Size, ...]] = []

    def add(operation: Operation, axis: str, module: str, phase: Phase, *, varies: bool = False):
        if axis not in ranks_of:
            return
        calls.append(
            Call(
                iteration=1,
                operation=operation,
                reduction="sum" if operation.reduces else "",
                group=numbers[axis],
                dtype="bfloat16",
                agreed=-1 if varies else 1 << 20,
                peer=-1,
                module=module,
                direction=phase,
                where=f"megatron/core/{operation}.py:{len(calls) % 7} ({phase})",
            )
        )
        # Each rank sends its own number of tokens in each of two microbatches.
        tokens = (14_336 * (1 + hash((rank, module, phase, n)) % 4096) for n in range(2))
        sizes.append(tuple(Size(n, 1) for n in tokens) if varies else (Size(1 << 20, 2),))

    layers = [layer for chunk in job.chunks[job.mesh(rank).at("pp")] for layer in chunk.layers]
    for layer, phase in itertools.product(layers, _PASSES):
        name = f"decoder.layers.{layer}"
        for leaf in _LINEAR:
            add(Operation.ALL_GATHER, "tp", f"{name}.{leaf}", phase)
            add(Operation.REDUCE_SCATTER, "tp", f"{name}.{leaf}", phase)
        add(Operation.ALL_GATHER, "cp", f"{name}.self_attention.core_attention", phase)
        for side in ("dispatch", "combine"):
            module = f"{name}.mlp.{side}"
            add(Operation.ALL_TO_ALL, "ep", module, phase, varies=True)
    for bucket in range(BUCKETS):
        for axis in ("dp-cp", "edp"):
            add(Operation.REDUCE_SCATTER, axis, f"bucket{bucket}", Phase.GRADIENTS)
            add(Operation.ALL_GATHER, axis, f"bucket{bucket}", Phase.PARAMETERS)
    for axis in ("tp", "pp", "world"):
        add(Operation.ALL_REDUCE, axis, "", Phase.OPTIMIZER)
    names = [f"decoder.layers.{n}.{leaf}" for n in layers for leaf, *_ in ATTENTION]
    code = ModuleCode(*(f"megatron/core/transformer/{n}.py:100 (forward)" for n in range(6)))
    codes = tuple(dataclasses.replace(code, built=f"{n}.py:1 (init)") for n in range(20))
    return RankLedger(
        tuple(calls),
        tuple(sizes),
        tuple(
            Group(axis, runs, f"{axis}{runs[0][0]}", f"{hash(axis) & 0xFFFFFFFF:016x}")
            for axis, runs in ranks_of.items()
        ),
        Sources({name: n % 20 for n, name in enumerate(names)}, codes),
    )


def counted(job: Job, rank: int) -> Counted:
    """As of one step with the distributed optimizer."""
    mesh, ranks_of = job.mesh(rank), groups(job, rank)
    parts_of: dict[bool, list[Part]] = {True: [], False: []}
    replicas = {True: job.edp, False: job.dp * job.cp}
    at = {True: mesh.at("edp"), False: mesh.at("dp") * job.cp + mesh.at("cp")}
    copies: set[str] = set()  # on each tensor-parallel rank
    shards: dict[bool, list[Part]] = {True: [], False: []}

    def part(local: Local, span: tuple[int, int] | None = None) -> Part:
        where = place(local, mesh)
        where = where.flat(*span) if span else where
        return Part(local.name, where.logical_shape, where.boxes(mesh))

    for chunk in job.chunks[mesh.at("pp")]:
        dense, experts = list(job.dense(chunk)), list(job.of_experts(chunk, mesh.at("ep")))
        for is_expert, tensors in ((False, dense), (True, experts)):
            parts_of[is_expert] += map(part, tensors)
            if not is_expert:
                copies |= {tensor.name for tensor in tensors if not tensor.tensor_model_parallel}
            if tensors:
                ranges = Zero.of(tensors, job, replicas[is_expert]).ranges(at[is_expert])
                shards[is_expert] += [part(tensor, (start, end)) for tensor, start, end in ranges]

    parts: list[Part] = []

    def numbered(new_parts: list[Part]) -> tuple[Term, ...]:
        parts.extend(new_parts)
        return tuple(Term(n) for n in range(len(parts) - len(new_parts), len(parts)))

    stepped = numbered(shards[False]), numbered(shards[True])
    own_parts = tuple(term.number for which in (False, True) for term in numbered(parts_of[which]))
    reduced, unreduced = [], list[Term]()
    for is_expert, axis in ((False, "dp-cp"), (True, "edp")):
        terms = numbered(
            [
                Part(
                    held.name,
                    (replicas[is_expert], *held.shape),
                    tuple(
                        Box((at[is_expert], *b.logical), (1, *b.extent), (0, *b.local))
                        for b in held.boxes
                    ),
                )
                for held in parts_of[is_expert]
            ]
        )
        if axis in ranks_of:
            size = -(-len(terms) // BUCKETS)
            buckets = [terms[n : n + size] for n in range(0, len(terms), size)]
            reduced += [Sum(ranks_of[axis], n, bucket) for n, bucket in enumerate(buckets)]
        else:
            unreduced += terms
    world = ranks_of["world"]
    summed = tuple(
        term
        for term in (*stepped[0], *stepped[1])
        if not mesh.at("tp") or parts[term.number].name not in copies
    )
    norms = [
        Counting(norm, (Sum(world, 0, summed),), (), (Term(0),))
        for norm in (Statistic.GRAD_NORM, Statistic.PARAMS_NORM)
    ]
    gathered, ungathered = [], list[Term]()
    for axis, terms in zip(("dp-cp", "edp"), stepped, strict=True):
        if axis in ranks_of:
            gathered.append(Sum(ranks_of[axis], 0, terms))
        else:
            ungathered += terms

    def counting(statistic: Statistic, made: list[Sum], more: list[Term]) -> Counting:
        sums = tuple(Term(number) for number in range(len(made)))
        return Counting(statistic, tuple(made), tuple(more), sums)

    clipped = Counting(Statistic.CLIPPED, (), (*stepped[0], *stepped[1]), (), 1.25)
    return Counted(
        1,
        tuple(parts),
        own_parts,
        (
            *norms,
            clipped,
            counting(Statistic.STEPPED, gathered, ungathered),
            counting(Statistic.REDUCED, reduced, unreduced),
        ),
    )
