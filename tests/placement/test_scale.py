# SPDX-License-Identifier: Apache-2.0
"""Layers of a trillion parameters: every element is held, with as much work in any world."""

import sys
from collections import Counter, defaultdict

import pytest

from megatron_ttrace.placement.coverage import Coverage, coverage
from megatron_ttrace.placement.token_index import expert_boxes, match
from megatron_ttrace.trace.records import Kind
from tests.placement.routed import dispatch
from tests.placement.scale import JOBS, boxes_of, encoded, planners
from tests.placement.trillion import EXPERT, HIDDEN, SEQUENCE, TOP_K, Chunk, Job

SMALL = (
    Job(tp=4, cp=2, pp=2, dp=2, ep=8),
    Job(tp=2, cp=2, pp=2, dp=4, ep=4, etp=2),
    # In this order Megatron wants as many replicas of experts as of other layers.
    Job(tp=2, cp=2, pp=2, dp=4, ep=4, order="tp-cp-ep-pp-dp"),
)
"""32 ranks each."""


def whole_model(job):
    """All names of the model, from one rank that would hold everything."""
    alone = Chunk(tuple(range(4 * job.pp - 3)), first=True, last=True)
    names = {local.name: local.whole for local in job.dense(alone)}
    for ep in range(job.ep):
        names |= {local.name: local.whole for local in job.of_experts(alone, ep)}
    return names


@pytest.mark.parametrize("job", SMALL, ids=str)
def test_every_element_is_held(job):
    """Of parameters by all replicas, of optimizer states by one, of activations by tp ranks.

    Each rank plans with its own mesh; Megatron's own code divides the optimizer's buckets.
    """
    held = defaultdict(list)
    for rank in range(job.world):
        plans = planners(job, rank)
        for measured in (*plans["parameters"](), *plans["states"](), *plans["activations"]()):
            name, kind = measured.key.name, measured.key.kind
            axis, replicas = ("etp", job.edp) if ".experts." in name else ("tp", job.dp * job.cp)
            owners = replicas if kind is Kind.PARAM else 1
            owners *= 1 if f"{axis}:" in measured.placement else getattr(job, axis)
            held[measured.key, measured.logical_shape, owners] += measured.boxes
    for (key, shape, owners), boxes in held.items():
        assert coverage(shape, boxes) == Coverage(owners, owners), key
    shapes = {key.name: shape for key, shape, _ in held if key.kind is Kind.PARAM}
    assert shapes == whole_model(job)


@pytest.mark.parametrize("job", SMALL, ids=str)
def test_rows_of_experts(job):
    """Each element of each expert's rows is on one rank; partial ones on all of etp."""
    edp = job.edp - 1
    sent = dispatch(job, edp)
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
            whole = len(known.expert), size
            for mesh in job.group(edp):
                local = len(sent.here[mesh.at("ep")].expert), within
                boxes += expert_boxes(rows[mesh.at("ep")][0], local, whole, mesh, blocks)[1]
            replicas = job.etp if within == size else 1
            assert coverage(whole, boxes) == Coverage(replicas, replicas)


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
