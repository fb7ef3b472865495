# SPDX-License-Identifier: Apache-2.0
"""Who calls Megatron's functions, and gradients that are kept from step to step."""

import sys
import types

import torch
from torch import nn

from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.replaced import wrapped
from megatron_ttrace.mcore.statistics import following, leave_gradients, users, zero_gradients


class FP32Optimizer:
    """With the name of Megatron's."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer


def test_gradients_of_a_step_before():
    """Those in buckets are filled; a wrapper without buckets, and other parameters, are left."""
    ours, others = nn.Linear(2, 2), nn.Linear(2, 2)
    ours.bucket_groups = [object()]
    ours.weight.main_grad, others.weight.main_grad = torch.zeros(2, 2), torch.zeros(2, 2)
    ours.bias.main_grad = torch.zeros(2, requires_grad=True)
    optimizer = FP32Optimizer(torch.optim.SGD([ours.weight, others.bias]))
    leave_gradients([ours, others], optimizer)
    assert ours.weight.grad is ours.weight.main_grad
    assert others.bias.grad is None
    assert ours.weight.main_grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert not others.weight.main_grad.any()
    zero_gradients([ours, others])
    assert not ours.weight.main_grad.any()


def test_what_the_next_update_depends_on():
    """Steps are counted for each parameter, or for a group."""
    weight = nn.Parameter(torch.zeros(2))
    adam = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.25)
    [group] = adam.param_groups
    assert following(adam.state, group) == (("lr", 0.5), ("weight_decay", 0.25))
    weight.grad = torch.ones(2)
    adam.step()
    # A checkpoint's number in the group is not what it steps with.
    assert following(adam.state, {**group, "step": 7})[2:] == (("step", 1.0),)
    assert following({}, {"params": [weight], "step": 7}) == (("step", 7.0),)
    for own in ({weight: torch.ones(2)}, {weight: {"step": "first"}}):
        group = {"params": [weight], "lr": 0.5, "step": "first"}
        assert following(own, group) == (("lr", 0.5),)


def test_a_method_that_the_user_replaced(monkeypatch) -> None:
    """It calls its own module's function, which may call Megatron's: that is one call."""
    module = types.ModuleType("megatron.made")
    module.__file__ = f"{sources.megatron_folder()}core/made.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    script = {"made": module}
    exec(compile("clip = lambda: made.clip()\nstep = lambda: clip()", "a.py", "exec"), script)
    own, calls = script["clip"], []
    vars(module).update(
        clip=lambda: 1,
        Optimizer=type("Optimizer", (), {"__module__": module.__name__, "step": script["step"]}),
    )

    def call(original):
        calls.append(original)
        return original()

    with wrapped(users({"clip": call})):
        assert module.Optimizer.step() == module.clip() == 1
    assert calls == [own, module.clip]
    assert script["clip"] is own


def test_modules_that_a_script_blocks(monkeypatch) -> None:
    """Python does not import what is None among its modules; nothing is in there."""
    monkeypatch.setitem(sys.modules, "megatron.made", None)
    assert not [*users({"a_name_that_no_module_has": print})]
