# SPDX-License-Identifier: Apache-2.0
"""A trillion parameters on 16,384 ranks: everything is planned, every element is held once."""

import dataclasses
import math
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.placement.coverage import Coverage, coverage
from megatron_ttrace.placement.infer import infer_activation
from megatron_ttrace.placement.placements import BlockShard, Shard, ZigZag
from megatron_ttrace.placement.plan import Step, plan
from megatron_ttrace.placement.token_index import expert_boxes, match
from tests.placement.meshes import mesh_of
from tests.placement.proof import axes_of, counted, distinct, knowing
from tests.placement.routed import dispatch
from tests.placement.scale import JOBS, boxes_of, encoded, planners
from tests.placement.trillion import (
    EXPERT,
    HIDDEN,
    SEQUENCE,
    TOP_K,
    Chunk,
    Job,
    Zero,
    activations,
    place,
)

PLAIN = Job(tp=8, cp=4, pp=16, dp=32, ep=64)
DIVIDED = Job(tp=4, cp=2, pp=16, dp=128, ep=64, etp=2)
TURNED = dataclasses.replace(PLAIN, ep=32, order="tp-cp-ep-pp-dp")
"""In this order Megatron wants as many replicas of experts as of other layers."""
IDS = {PLAIN: "tp8-cp4-pp16-ep64-dp32", DIVIDED: "tp4-cp2-pp16-ep64-etp2-dp128", TURNED: "pp-dp"}
LARGE = pytest.mark.parametrize("job", IDS, ids=IDS.get)


@pytest.fixture(autouse=True, scope="module")
def _forget():
    """The coordinates of 16,384 ranks are kept for this module only."""
    yield
    for job in (PLAIN, DIVIDED, TURNED):
        job.__dict__.pop("places", None)


def whole_model(job):
    """All names of the model, from one rank that would hold everything."""
    alone = Chunk(tuple(range(4 * job.pp - 3)), first=True, last=True)
    names = {local.name: local.whole for local in job.dense(alone)}
    for ep in range(job.ep):
        names |= {local.name: local.whole for local in job.of_experts(alone, ep)}
    return names


def test_the_model_is_the_public_one():
    """1.03 trillion parameters, of which a token uses 33 billion; 61 layers, uneven stages."""
    sizes = {name: math.prod(shape) for name, shape in whole_model(PLAIN).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert 1.02e12 < sum(sizes.values()) < 1.04e12
    assert 3.2e10 < sum(sizes.values()) - experts * (1 - TOP_K / PLAIN.experts) < 3.4e10
    layers = [len(chunk.layers) for chunks in PLAIN.chunks.values() for chunk in chunks]
    assert (sum(layers), min(layers), max(layers)) == (61, 1, 2)
    assert PLAIN.world == DIVIDED.world == 16_384


@pytest.mark.parametrize(
    "job",
    [
        PLAIN,
        pytest.param(DIVIDED, marks=pytest.mark.nightly),
        pytest.param(TURNED, marks=pytest.mark.nightly),
    ],
    ids=IDS.values(),
)
def test_parameters(job):
    """Each element of each of 47,000 parameters is held by all replicas and by nobody else."""
    mesh = knowing(job.mesh(0))
    names = Counter()
    memo = {}

    def prove(local, **where):
        at = place(local, mesh)
        key = at.logical_shape, at.placement, *where.values()
        if key not in memo:
            held = [
                (at.boxes(here), ranks)
                for here, ranks in distinct(mesh, job.at(**where), axes_of(at.placement))
            ]
            memo[key] = counted(at.logical_shape, held)
        axis = "tp" if local.allreduce else "etp"
        replicas = job.dp * job.cp if local.allreduce else job.edp
        replicas *= 1 if at.placement else getattr(job, axis)
        assert memo[key] == Coverage(replicas, replicas), local.name
        names[local.name] += 1

    for stage, chunks in job.chunks.items():
        for chunk in chunks:
            for local in job.dense(chunk):
                prove(local, pp=stage)
            for ep in range(job.ep if any(chunk.layers) else 0):
                for local in job.of_experts(chunk, ep):
                    prove(local, pp=stage, ep=ep)
    assert names == dict.fromkeys(whole_model(job), 1)


def test_sampled_ranks():
    """What a rank plans with its own mesh is one of the plans that are counted above."""
    mesh = knowing(PLAIN.mesh(0))
    for rank in range(0, PLAIN.world, 1031):
        here = PLAIN.mesh(rank)
        for chunk in PLAIN.chunks[here.at("pp")]:
            for local in (*PLAIN.dense(chunk), *PLAIN.of_experts(chunk, here.at("ep"))):
                at = place(local, mesh)
                known = {axis: here.at(axis) for axis in axes_of(at.placement)}
                boxes = at.boxes(here)
                assert boxes == at.boxes(knowing(mesh, **known))
                assert sum(box.numel for box in boxes) == local.nelement()


@LARGE
def test_gradients_and_states_of_zero(job):
    """Main gradients, updates and moments: each element of each tp part has one owner.

    Megatron's own code divides the buckets. It divides those of equal chunks equally, so each
    shape of chunk is planned once.
    """
    mesh = knowing(job.mesh(0))
    proven = set()
    for stage, chunks in job.chunks.items():
        for groups, owners in ((("tp",), job.dp * job.cp), (("etp", "ep"), job.edp)):
            sharing = distinct(mesh, job.at(pp=stage), groups)
            assert {ranks for _, ranks in sharing} == {owners}
        for chunk in chunks:
            if chunk.shape in proven:
                continue
            proven.add(chunk.shape)
            buffers = [("tp", list(job.dense(chunk)), job.dp * job.cp)]
            if any(chunk.layers):
                buffers.append(("etp", list(job.of_experts(chunk, 0)), job.edp))
            for axis, parameters, shards in buffers:
                held = owned(Zero.of(parameters, job, shards), mesh, axis)
                for local in parameters:
                    at = place(local, mesh)
                    replicas = 1 if at.placement else mesh.size(axis)
                    covered = counted(local.whole, [(held[local], replicas)])
                    assert covered == Coverage(replicas, replicas), local.name
    assert len(proven) == 4


def owned(zero, mesh, axis):
    """The boxes of all shards, on each rank of the axis that divides the parameter."""
    boxes = defaultdict(tuple)
    for shard in range(zero.shards):
        for local, start, end in zero.ranges(shard):
            at = place(local, mesh)
            for here in range(mesh.size(axis) if at.placement else 1):
                boxes[local] += at.flat(start, end).boxes(knowing(mesh, **{axis: here}))
    return boxes


@LARGE
def test_activations(job):
    """Each element of what a microbatch's modules see is held, by all tp ranks or by one."""
    mesh = knowing(job.mesh(0))
    everywhere = distinct(mesh, job.places, ("pp", "dp", "cp", "tp"))
    assert {ranks for _, ranks in everywhere} == {1}
    assert len(everywhere) == job.world  # so each microbatch has all tp x cp ranks of each stage
    kinds = {
        (dims, blocks)
        for chunks in job.chunks.values()
        for chunk in chunks
        for _, _, dims, blocks in activations(chunk, job)
    }
    assert len(kinds) > 15
    one_microbatch = job.at(pp=1, dp=job.dp - 1)
    for dims, blocks in kinds:
        whole = tuple(size for size, _ in dims)
        axes = [axis for _, divided in dims for axis in divided]
        local = tuple(size // math.prod(getattr(job, a) for a in by) for size, by in dims)
        placement = infer_activation(local, whole, mesh, seq_length=SEQUENCE, blocks=blocks)
        assert sorted(axes_of(placement)) == sorted(axes)
        held = [
            (plan(whole, placement, here), ranks)
            for here, ranks in distinct(mesh, one_microbatch, axes_of(placement))
        ]
        replicas = 1 if "tp" in axes else job.tp
        assert counted(whole, held) == Coverage(replicas, replicas), dims


@pytest.mark.parametrize(
    "job",
    [
        PLAIN,
        pytest.param(DIVIDED, marks=pytest.mark.nightly),
        pytest.param(TURNED, marks=pytest.mark.nightly),
    ],
    ids=IDS.values(),
)
def test_rows_of_experts(job):
    """Each element of each expert's rows is on one rank; partial ones on all of etp."""
    mesh = knowing(job.mesh(0))
    edp = job.edp - 1
    sent = dispatch(job, edp=edp)
    group = distinct(mesh, job.at(pp=0, edp=edp), ("ep", "etp"))
    assert len(group) == job.ep * job.etp
    assert {ranks for _, ranks in group} == {1}
    assert len(sent.there) == job.ep * job.etp // (job.tp * job.cp)
    for microbatch, known in sent.there.items():
        assert len(known.expert) == SEQUENCE * TOP_K
        rows = {ep: match(here, known, microbatch) for ep, here in sent.here.items()}
        assert not any(strangers for _, strangers in rows.values())
        part = EXPERT // job.etp
        for size, within, blocks in (
            (HIDDEN, HIDDEN, 1),
            (EXPERT, part, 1),
            (2 * EXPERT, 2 * part, 2),
        ):
            boxes = []
            for here, _ in group:
                mine = rows[here.at("ep")][0]
                local = len(sent.here[here.at("ep")].expert), within
                whole = len(known.expert), size
                boxes += expert_boxes(mine, local, whole, here, blocks)[1]
            replicas = job.etp if within == size else 1
            assert coverage(whole, boxes) == Coverage(replicas, replicas)


@pytest.mark.parametrize("lost", [0, 9_999, 16_383])
def test_a_lost_rank_is_noticed(lost):
    """One of 16,384 ranks holds nothing: then some elements have a replica less."""
    mesh = knowing(PLAIN.mesh(0))
    stage = PLAIN.mesh(lost).at("pp")
    whole = (2 * EXPERT, HIDDEN)
    gone = PLAIN.mesh(lost).coordinates
    left = [row for row in PLAIN.at(pp=stage) if tuple(row) != gone]
    steps = (Step("tp", BlockShard(0)),)
    held = [(plan(whole, steps, m), n) for m, n in distinct(mesh, np.array(left), ("tp",))]
    replicas = PLAIN.dp * PLAIN.cp
    assert counted(whole, held) == Coverage(replicas - 1, replicas)


@pytest.mark.parametrize("where", [0, 17])
def test_a_rank_plans_as_much_in_any_world(where):
    """64, 1,024 and 16,384 ranks: boxes, bytes and calls of functions; only ZeRO's part shrinks."""
    assert [job.world for job in JOBS] == [64, 1024, 16_384]
    work = defaultdict(list)
    for job in JOBS:
        for kind, made in planners(job, where).items():
            events = Counter()
            sys.setprofile(lambda frame, event, _, events=events: events.update([event]))
            try:
                measured = made()
            finally:
                sys.setprofile(None)
            calls = events["call"] + events["c_call"]
            work[kind].append((calls, boxes_of(measured), len(encoded(measured))))
    shrinking = work.pop("states")
    assert all(after < before for after, before in zip(shrinking[1], shrinking[0], strict=True))
    assert all(after < before for after, before in zip(shrinking[2], shrinking[1], strict=True))
    assert sorted(work) == ["activations", "parameters", "rows of experts"]
    for small, middle, large in work.values():
        assert small == pytest.approx(large, rel=0.1)
        assert middle == pytest.approx(large, rel=0.02)


sizes = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def meshes(draw):
    """Sizes of axes and an order; worlds of up to 1,536 ranks."""
    tp, cp, pp = draw(sizes), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3]))
    order = "-".join(draw(st.permutations(["tp", "cp", "ep", "dp", "pp"])))
    dp = draw(st.sampled_from([1, 2, 5, 16]))
    return {"tp": tp, "cp": cp, "pp": pp, "order": order}, tp * cp * pp * dp


@settings(max_examples=30)
@given(world=meshes(), inner=st.sampled_from(["shard", "gated", "same", "none"]), data=st.data())
def test_counting_by_coordinates_is_counting_all_ranks(world, inner, data):
    """The shortcut of the tests above against every rank's own plan, where ranks may be lost."""
    layout, size = world
    ranks = [mesh_of(rank, size, **layout) for rank in range(size)]
    shape = (2 * layout["cp"] * layout["tp"] * 2, 2 * layout["tp"] * 3)
    steps = {
        "shard": (Step("cp", ZigZag(0)), Step("tp", Shard(1))),
        "gated": (Step("cp", ZigZag(0)), Step("tp", BlockShard(1))),
        "same": (Step("cp", ZigZag(0)), Step("tp", Shard(0))),
        "none": (),
    }[inner]
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=min(3, size - 1)))
    there = [mesh for mesh in ranks if mesh.rank not in lost]
    places = np.array([mesh.coordinates for mesh in there])
    held = [(plan(shape, steps, m), n) for m, n in distinct(ranks[0], places, axes_of(steps))]
    boxes = [box for mesh in there for box in plan(shape, steps, mesh)]
    assert counted(shape, held) == coverage(shape, boxes)
