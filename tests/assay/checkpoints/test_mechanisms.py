# SPDX-License-Identifier: Apache-2.0
"""Mechanisms on state made by hand; ``test_plain.py`` runs some in a job."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.assay.planted import checkpoint_faults as faults
from tests.assay.planted.live import NUMBER, Live


def test_everything_is_made_good():
    """Attributes, entries of dictionaries and tensors are as before, after all changes."""
    group, owner, live = {"step": 3}, SimpleNamespace(num_steps=16), Live()
    tensor = torch.arange(4.0)
    live.tensors = lambda: {("exp_avg", "a"): tensor}
    live.set(group, "step", 0, "step")
    live.set(owner, "num_steps", 0, "num_steps")
    live.change(("exp_avg", "a"), torch.zeros_like)
    live.change(("exp_avg", "b"), torch.zeros_like)
    assert (group, owner.num_steps, tensor.tolist()) == ({"step": 0}, 0, [0.0] * 4)
    assert live.truth == [(NUMBER, "step"), (NUMBER, "num_steps"), ("exp_avg", "a")]
    while live.undo:
        live.undo.pop()()
    assert (group, owner.num_steps, tensor.tolist()) == ({"step": 3}, 16, [0.0, 1.0, 2.0, 3.0])


def test_a_change_without_effect_is_none():
    """What is proved to differ is what was changed."""
    live = Live()
    live.tensors = lambda: {("exp_avg", "a"): torch.zeros(2)}
    live.change(("exp_avg", "a"), torch.zeros_like)
    assert live.truth == []


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
        shards = [
            make(
                "decoder.layers.mlp.experts.experts.linear_fc2.weight",
                torch.zeros(3),
                *((0, 0, 2), (1, rank * mine + number, 4)),
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
