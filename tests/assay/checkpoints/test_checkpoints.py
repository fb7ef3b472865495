# SPDX-License-Identifier: Apache-2.0
"""The sample of faults, their proofs, and which reported differences count as right."""

import random
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from tests.assay.checkpoints.answers import Named, is_right
from tests.assay.checkpoints.jobs import Layout, Planted, jobs, sample
from tests.assay.checkpoints.plain import Workshop
from tests.assay.planted import checkpoint_faults as faults
from tests.assay.planted.checkpoint_faults import MECHANISMS, Side
from tests.assay.planted.checkpoints import Fault
from tests.assay.planted.live import NUMBER, Live

PROJ = "decoder.layers.1.self_attention.linear_proj.weight"


def test_the_table_of_jobs():
    """At least 60 pairs, most of which change the layout; what remains are flags and values."""
    pairs = [(job, layout) for job in jobs().values() for layout in job.into]
    assert len(pairs) >= 60
    assert sum(layout != job.layout for job, layout in pairs) >= 40
    for job in jobs().values():
        words = [*job.base, *job.layout.flags, *(w for layout in job.into for w in layout.flags)]
        assert not {"tp2", "zero", "async", "deep", "uneven"} & {*words}


def test_a_changed_layout():
    """Sizes that are gone become 1; nothing is added in the same layout."""
    before = Layout.of("2 tp2 sp")
    assert before.changed(before) == ()
    changed = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"
    assert " ".join(Layout.of("2 pp2").changed(before)) == changed
    assert Layout.of("1").changed(Layout.of("2")) == ()


def test_what_mechanisms_may_need():
    """Words are derived from model, dtype and layout."""
    words = {name: job.words for name, job in jobs().items()}
    assert {"tp", "deep", "torch_dist", "decay"} <= words["tp"]
    assert "main" not in words["tp"]
    assert {"main", "gated"} <= words["tp-bf16"]
    assert {"ep", "experts", "bias", "gated", "main"} <= words["experts-deep"]
    assert "torch_dist" not in words["torch"] | words["fsdp"]
    assert "deep" not in words["sinks"]


def test_a_sample():
    """A seed is a sample; each round has every mechanism once, in a job that has what it needs."""
    drawn = list(islice(sample(5), 2 * len(MECHANISMS)))
    assert drawn == list(islice(sample(5), len(drawn))) != list(islice(sample(6), len(drawn)))
    for part in (drawn[: len(MECHANISMS)], drawn[len(MECHANISMS) :]):
        assert sorted(planted.fault.mechanism for planted in part) == sorted(MECHANISMS)
    for planted in drawn:
        kind = MECHANISMS[planted.fault.mechanism]
        assert kind.needs <= planted.job.words
        assert planted.fault.side in kind.sides
        assert planted.into in (*planted.job.into, planted.job.layout)
        assert not kind.describes or planted.into != planted.job.layout
        assert Fault.of(planted.fault.order) == planted.fault


@pytest.mark.parametrize(
    ("named", "truth", "right"),
    [
        (Named("exp_avg", PROJ), ("exp_avg", PROJ), True),
        (Named("main weight", PROJ), ("main", PROJ), True),
        (Named("exp_avg", PROJ), ("momentum_buffer", PROJ), True),
        (Named("weight", PROJ.rpartition(".")[0]), ("weight", PROJ), True),
        (Named("agreed", PROJ), ("main", PROJ), True),
        (Named("agreed", PROJ), ("exp_avg", PROJ), False),
        (Named("weight", PROJ), ("exp_avg", PROJ), False),
        (Named("exp_avg", PROJ.replace("1", "0")), ("exp_avg", PROJ), False),
        (Named("loss", "3"), ("exp_avg", PROJ), False),
        (Named("number", "group 0.step"), ("number", "step"), True),
        (Named("samples", "3"), ("number", "consumed_train_samples"), True),
        (Named("number", "group 0.beta1"), ("number", "step"), False),
        (Named("weight", PROJ), ("described", PROJ.replace(".1.", ".")), True),
        (Named("main weight", PROJ), ("described", f"optimizer.state.param.{PROJ}"), True),
        (Named("weight", PROJ), ("described", f"optimizer.state.exp_avg.{PROJ}"), False),
    ],
)
def test_right(named, truth, right):
    """The state must be the one that was changed, of the parameter or its module."""
    assert is_right(named, [truth]) is right


def test_everything_is_made_good():
    """Values are as before, after all changes; a change without an effect is none."""
    group, owner, live = {"step": 3}, SimpleNamespace(num_steps=16), Live()
    tensor, zeros = torch.arange(4.0), torch.zeros(2)
    live.tensors = lambda: {("exp_avg", "a"): tensor, ("exp_avg", "zero"): zeros}
    live.set(group, "step", 0, "step")
    live.set(owner, "num_steps", 0, "num_steps")
    for name in ("a", "absent", "zero"):
        live.change(("exp_avg", name), torch.zeros_like)
    assert (group, owner.num_steps, tensor.tolist()) == ({"step": 0}, 0, [0.0] * 4)
    assert live.truth == [(NUMBER, "step"), (NUMBER, "num_steps"), ("exp_avg", "a")]
    while live.undo:
        live.undo.pop()()
    assert (group, owner.num_steps, tensor.tolist()) == ({"step": 3}, 16, [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("experts", "rank", "count", "offsets"),
    [
        (False, 0, 2, [(0, 4)]),
        (False, 1, 2, [(0, 0)]),
        (True, 0, 2, [(0, 2, 0), (0, 3, 0)]),
        (True, 3, 4, [(0, 0, 0)]),
    ],
)
def test_ranks_in_the_other_order(monkeypatch, experts, rank, count, offsets):
    """Ranks are counted from the end, and the experts of a rank stay in order."""
    mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    make = mapping.ShardedTensor.from_rank_offsets
    monkeypatch.setattr(faults, "gathered", lambda mine, group=None: [mine])
    if experts:
        mine = 4 // count
        name = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
        shards = [
            make(
                *(name, torch.zeros(3), (0, 0, 2), (1, rank * mine + number, 4)),
                prepend_axis_num=2,
            )
            for number in range(mine)
        ]
    else:
        shards = [make("embedding.weight", torch.zeros(3, 4), (1, rank, count))]
    live = Live(described={"model": {"norm": make("norm", torch.zeros(2)), "all": shards}})
    faults._turn(live, random.Random(1), experts=experts)
    assert [shard.global_offset for shard in shards] == offsets
    assert {state for state, _ in live.truth} == {"described"}


@pytest.mark.nightly
def test_proofs(tmp_path):
    """Moments that are lost are real on either side; a fault of data has no wrong tensor."""
    workshop, job = Workshop(tmp_path), jobs()["tp"]
    layout = Layout.of("2 tp2")
    healthy = workshop.resumed(job, layout)
    assert healthy.code == 0, healthy.error
    assert set(healthy.bits) < set(workshop.saved(job).bits)
    for side in Side:
        proof = workshop.prove(Planted(Fault(side, "lost_moment", 1), job, layout))
        assert proof.is_real
        assert proof.trains
        changed = {name.rpartition(".")[2] for name in proof.differs}
        assert changed == {state for state, _ in proof.truth}
    skipped = workshop.prove(Planted(Fault(Side.LOAD, "skipped_data", 1), job, layout))
    assert {name.split()[1] for name in skipped.differs} == {"consumed_train_samples"}
    assert skipped.trains
