# SPDX-License-Identifier: Apache-2.0
"""The numbers that a checkpoint holds."""

from argparse import Namespace

import torch

from megatron_ttrace.mcore.checkpoints.numbers import of_groups, of_state

GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "lr": 0.5, "betas": (0.9, 0.99), "params": [0, 1]}


def test_state() -> None:
    """What training continues from; not the arguments, nor tensors."""
    state = {
        "iteration": 3,
        "args": Namespace(consumed_train_samples=12, tensor_model_parallel_size=2),
        "opt_param_scheduler": {"num_steps": 12, "lr_decay_style": "linear"},
        "optimizer": {"grad_scaler": {"scale": torch.tensor([8.0])}, "x": torch.ones(2)},
        "num_floating_point_operations_so_far": 1e9,
    }
    assert of_state(state) == {
        "iteration": 3,
        "consumed_train_samples": 12,
        "opt_param_scheduler.num_steps": 12,
        "opt_param_scheduler.lr_decay_style": "linear",
        "loss_scale": 8.0,
    }


def test_groups_in_any_layout() -> None:
    """Chained optimizers, other orders, and objects of each rank hold the same numbers."""
    second = GROUP | {"wd_mult": 0.0, "lr": 0.25}
    flat = of_state({"optimizer": {"optimizer": {"param_groups": [GROUP, second]}}})
    same = GROUP | {"is_expert_parallel": False}
    chained = {
        0: {"optimizer": {"param_groups": [second | {"is_expert_parallel": False}, GROUP]}},
        1: {"optimizer": {"param_groups": [same]}},
    }
    assert of_state({"optimizer": chained}) == flat
    objects = {
        f"chained_{n}.optimizer.distributed.dp_group_idx_{n}.optimizer/shard_0_1": [value]
        for n, value in chained.items()
    }
    assert of_state(objects) == of_state({"optimizer": chained})
    assert flat["param_groups[wd_mult=0].lr"] == 0.25
    assert flat["param_groups[wd_mult=1].betas[1]"] == 0.99


def test_groups_that_differ() -> None:
    """A group with numbers of its own is not lost."""
    wrong = GROUP | {"lr": 0.1}
    numbers = of_groups([GROUP, wrong, GROUP])
    assert numbers["param_groups[wd_mult=1].lr"] == 0.5
    assert numbers["param_groups[wd_mult=1]#2.lr"] == 0.1
    assert len(numbers) == 6


def test_groups_with_nan() -> None:
    """NaN equals NaN, so groups with it agree."""
    nan = GROUP | {"lr": float("nan")}
    assert of_groups([nan, dict(nan)]).keys() == of_groups([GROUP]).keys()
