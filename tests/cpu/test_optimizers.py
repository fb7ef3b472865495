# SPDX-License-Identifier: Apache-2.0
"""The optimizers against PyTorch's, and resuming."""

import copy

import pytest
import torch

from megatron_ttrace.cpu.optimizers import FusedAdam, FusedSGD


def parameters(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in ((4, 3), (7,))
    ]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that depend on the step only."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    ("decoupled", "theirs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
def test_adam_is_torchs(decoupled, theirs):
    mine, expected = parameters(torch.float32), parameters(torch.float32)
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    train(FusedAdam(mine, adam_w_mode=decoupled, **options), range(6))
    train(theirs(expected, **options), range(6))
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_the_two_decays_differ():
    coupled, decoupled = parameters(torch.float32), parameters(torch.float32)
    train(FusedAdam(coupled, adam_w_mode=False, weight_decay=0.1), range(3))
    train(FusedAdam(decoupled, adam_w_mode=True, weight_decay=0.1), range(3))
    assert not torch.allclose(coupled[0], decoupled[0], atol=1e-6)


def test_bf16_parameters_keep_their_dtype_and_round_once():
    [p, _] = mine = parameters(torch.bfloat16)
    before = p.detach().clone()
    optimizer = FusedAdam(mine, lr=0.1, weight_decay=0.0)
    p.grad = torch.full_like(p, 0.25)
    optimizer.step()
    # After one step both corrected moments are the gradient's: the update is its sign.
    assert torch.equal(p, (before.float() - 0.1 * (0.25 / (0.25 + 1e-8))).bfloat16())
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16


def test_steps_are_counted_by_group():
    """Megatron saves the step with the group: that is why this class exists."""
    mine = parameters()
    optimizer = FusedAdam([{"params": mine}, {"params": []}])
    train(optimizer, range(3))
    full, empty = optimizer.param_groups
    assert full["step"] == 3
    assert "step" not in empty
    assert set(optimizer.state[mine[0]]) == {"exp_avg", "exp_avg_sq"}


def test_resumed_is_bitwise_uninterrupted():
    whole, first = parameters(torch.float32), parameters(torch.float32)
    train(FusedAdam(whole, lr=0.1), range(6))
    interrupted = FusedAdam(first, lr=0.1)
    train(interrupted, range(3))
    second = copy.deepcopy(first)
    resumed = FusedAdam(second, lr=0.1)
    resumed.load_state_dict(copy.deepcopy(interrupted.state_dict()))
    train(resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


def test_parameters_without_gradient_stay():
    mine = parameters()
    before = [p.detach().clone() for p in mine]
    optimizer = FusedAdam(mine, weight_decay=0.5)
    mine[1].grad = torch.ones_like(mine[1])
    optimizer.step()
    assert torch.equal(mine[0], before[0])
    assert not torch.equal(mine[1], before[1])


def test_sgd_is_torchs():
    mine, expected = parameters(), parameters()
    train(FusedSGD(mine, lr=0.1, momentum=0.9, weight_decay=0.1), range(4))
    train(torch.optim.SGD(expected, lr=0.1, momentum=0.9, weight_decay=0.1), range(4))
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"capturable": True}])
def test_what_is_not_offered_is_refused(options):
    with pytest.raises((RuntimeError, NotImplementedError)):
        FusedAdam(parameters(), **options)
