# SPDX-License-Identifier: Apache-2.0
"""The training state of a rank: which tensors and numbers there are, and where they belong."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.capture import state
from megatron_ttrace.mcore.statistics import group_names
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.trace.records import LoadedIndex
from tests.capture.stepped import stepped

MOMENTS = {LoadedIndex.EXP_AVG, LoadedIndex.EXP_AVG_SQ}


def model_of(monkeypatch: pytest.MonkeyPatch, halves: int = 1) -> SimpleNamespace:
    """A layer in bfloat16; the optimizer has main weights of the first of ``halves`` of each."""
    layer = torch.nn.Linear(4, 2).bfloat16()
    mains = [one.data.float() for one in layer.parameters()]
    if halves > 1:
        mains = [main.view(-1)[: main.numel() // halves] for main in mains]
    model = stepped(monkeypatch, layer, mains, lr=0.25, betas=(0.5, 0.75))
    for main in mains:
        model.optimizer.optimizer.state[main]["basis"] = torch.eye(2)
    return model


def test_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, main weights, moments, other state by its name, and buffers."""
    found = list(state.held_state(model_of(monkeypatch)))
    parts = {LoadedIndex.WEIGHT, LoadedIndex.MAIN, *MOMENTS}
    assert {(one.place.name, one.index) for one in found} == {
        *((name, index) for name in ("weight", "bias") for index in parts),
        *((f"{name}/basis", LoadedIndex.OTHER) for name in ("weight", "bias")),
        ("expert_bias", LoadedIndex.BUFFER),
    }
    assert {one.replicated for one in found} == {("dp", "cp")}
    assert {one.parameter is None for one in found if one.index is LoadedIndex.BUFFER} == {True}


def test_a_divided_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its own range; state of another shape has no place."""
    found = list(state.held_state(model_of(monkeypatch, 2)))
    parts = [one for one in found if one.index in {LoadedIndex.MAIN, *MOMENTS}]
    assert {one.replicated for one in parts} == {()}
    boxes = {one.place.name: one.place.boxes(SINGLE) for one in parts}
    assert {name: sum(box.numel for box in held) for name, held in boxes.items()} == {
        "weight": 4,
        "bias": 1,
    }
    assert not [one for one in found if one.index is LoadedIndex.OTHER]


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Position, scheduler, parameter group; a parameter that lost its steps is not hidden."""
    optimizer = model_of(monkeypatch).optimizer
    optimizer.optimizer.param_groups[0] |= {"wd_mult": 0.0, "is_expert_parallel": True}
    args = SimpleNamespace(iteration=3, consumed_train_samples=12)
    scheduler = SimpleNamespace(state_dict=lambda: {"num_steps": 12, "lr_decay_style": "linear"})
    numbers = state.held_numbers(args, scheduler, optimizer)  # type: ignore[arg-type]
    group = "param_groups[wd_mult=0,expert]"
    assert (
        numbers.items()
        >= {
            "iteration": 3.0,
            "consumed_train_samples": 12.0,
            "opt_param_scheduler.num_steps": 12.0,
            f"{group}.lr": 0.25,
            f"{group}.betas[1]": 0.75,
            f"{group}.step": 1.0,
        }.items()
    )
    main = optimizer.optimizer.param_groups[0]["params"][0]
    optimizer.optimizer.state[main]["step"] = torch.tensor(0.0)
    optimizer.optimizer.param_groups[0]["step"] = 1
    lost = state.held_numbers(args, scheduler, optimizer)  # type: ignore[arg-type]
    assert lost[f"{group}.step"] == 0.0


@pytest.mark.parametrize("state_dict", [{"scale": 4.0}, {"growth_tracker": 0, "scale": 4.0}])
def test_what_a_scaler_counts(state_dict: dict[str, float]) -> None:
    """Its own numbers, whatever it says that they are."""
    scaler = SimpleNamespace(
        _scale=torch.tensor([4.0]),
        _growth_tracker=3,
        growth_interval=5,
        state_dict=lambda: state_dict,
    )
    optimizer = SimpleNamespace(grad_scaler=scaler)
    args = SimpleNamespace(iteration=3)
    scheduler = SimpleNamespace(state_dict=dict)
    assert state.held_numbers(args, scheduler, optimizer) == {  # type: ignore[arg-type]
        "iteration": 3.0,
        "loss_scale": 4.0,
        "grad_scaler.growth_tracker": 3.0,
    }


def test_groups_that_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups' own numbers are the same, those of their parameters are not."""
    model = model_of(monkeypatch)
    (group,) = model.optimizer.optimizer.param_groups
    group["wd_mult"] = 0.0
    assert state.held_multipliers(model) == {  # type: ignore[arg-type]
        "param_groups[of weight].wd_mult": 0.0,
        "param_groups[of bias].wd_mult": 0.0,
    }


def test_groups_that_are_alike() -> None:
    """All but the first get a number; their order among different ones does not matter."""
    decayed, expert = {"wd_mult": 1.0}, {"wd_mult": 1.0, "is_expert_parallel": True, "lr_mult": 2.0}
    assert list(group_names([expert, decayed, decayed])) == [
        "param_groups[wd_mult=1,lr_mult=2,expert]",
        "param_groups[wd_mult=1]",
        "param_groups[wd_mult=1]#2",
    ]
