# SPDX-License-Identifier: Apache-2.0
"""Adam against PyTorch's, and with a state of fewer bits than float32."""

import copy

import pytest
import torch

from megatron_ttrace.cpu.te.optimizers import FusedAdam, joined, parted
from megatron_ttrace.mcore.optimizer import Owned, Snapshot
from megatron_ttrace.mcore.parameters import place_parameter
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run.start import moments

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def precise(parameter, **options):
    """As Megatron makes it for bf16 training."""
    return FusedAdam(
        [parameter],
        **OPTIONS,
        **{"master_weights": True, "use_decoupled_grad": True, **options},
    )


def train(optimizer, parameter, *, decoupled=False, steps=5):
    """Steps with gradients of a seed."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        gradient = torch.randn(parameter.shape, generator=generator)
        if decoupled:
            parameter.decoupled_grad = gradient
        else:
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def start():
    """A bf16 parameter."""
    return torch.nn.Parameter(
        torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).bfloat16()
    )


@pytest.mark.parametrize(
    ("decoupled", "theirs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
def test_adam_is_torchs(decoupled, theirs):
    """With either weight decay; they differ."""
    ours, other, expected = (torch.nn.Parameter(start().detach().float()) for _ in range(3))
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    train(FusedAdam([ours], adam_w_mode=decoupled, **options), ours)
    train(FusedAdam([other], adam_w_mode=not decoupled, **options), other)
    train(theirs([expected], **options), expected)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)
    assert not torch.allclose(other, expected, atol=1e-6)


def test_bf16_parameters_are_rounded_once():
    parameter = start()
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, 0.25)
    FusedAdam([parameter], lr=0.1, weight_decay=0.0).step()
    # After one step both corrected moments are the gradient's: the update is its sign.
    assert torch.equal(parameter, (before.float() - 0.1 * (0.25 / (0.25 + 1e-8))).bfloat16())


def test_steps_are_counted_by_group():
    """Megatron saves the step with the group; parameters without gradient stay as they are."""
    parameter, idle = start(), start()
    optimizer = FusedAdam([{"params": [parameter, idle]}, {"params": []}], weight_decay=0.5)
    train(optimizer, parameter, steps=3)
    full, empty = optimizer.param_groups
    assert full["step"] == 3
    assert "step" not in empty
    assert torch.equal(idle, start())
    assert not torch.equal(parameter, idle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("remainders", [True, False])
def test_resumed_with_a_state_of_its_own_types(dtype, remainders):
    """A saved state is in float32; loaded, it has its types and scales again, not the weight's.

    So the weights are bitwise those of an uninterrupted run.
    """
    options = {"exp_avg_dtype": dtype, "store_param_remainders": remainders}
    first = start()
    interrupted = precise(first, **options)
    train(interrupted, first, decoupled=True, steps=3)
    second = copy.deepcopy(first)
    resumed = precise(second, **options)
    assert not resumed.state_dict()["state"]
    saved = copy.deepcopy(interrupted.state_dict())
    assert saved["state"][0]["exp_avg"].dtype == torch.float32
    resumed.load_state_dict(saved)
    for name, value in interrupted.state[first].items():
        assert resumed.state[second][name].dtype == value.dtype
        ours, theirs = (
            optimizer.get_unscaled_state(parameter, name)
            for optimizer, parameter in ((resumed, second), (interrupted, first))
        )
        assert torch.equal(ours, theirs)
    train(interrupted, first, decoupled=True, steps=3)
    train(resumed, second, decoupled=True, steps=3)
    assert torch.equal(first, second)


def test_a_value_in_two_parts():
    """Every float32 value is a bf16 number, its nearest, and 16 bits."""
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(2)) * 1e3
    rounded, remainder = parted(values)
    assert torch.equal(joined(rounded, remainder), values)
    assert ((rounded.float() - values).abs() <= values.abs() * 2.0**-8).all()
    assert remainder.unique().numel() > 5_000


@pytest.mark.parametrize("remainders", [True, False])
def test_own_main_weights_are_those_of_float32_copies(remainders):
    """Bit for bit, after several steps; the parameter is their rounded value."""
    parameter = start()
    main = torch.nn.Parameter(parameter.detach().float())
    expected = FusedAdam([main], **OPTIONS)
    train(expected, main)
    inner = precise(parameter, store_param_remainders=remainders)
    assert torch.equal(Owned(parameter, inner, inner.param_groups[0]).weights, parameter)
    train(inner, parameter, decoupled=True)
    part = Owned(parameter, inner, inner.param_groups[0])
    assert torch.equal(part.weights, main)
    assert (inner.state[parameter]["master_param"].dtype == torch.int16) == remainders
    assert torch.allclose(parameter.float(), main, rtol=2.0**-8)
    assert torch.equal(part.state["exp_avg"], expected.state[main]["exp_avg"])
    inner.zero_grad()
    assert parameter.decoupled_grad is None


@pytest.mark.parametrize(
    ("dtype", "stored", "eps"),
    [
        (torch.uint8, torch.float8_e4m3fn, 2.0**-4),
        (torch.float16, torch.float16, 2.0**-11),
        (torch.bfloat16, torch.bfloat16, 2.0**-8),
    ],
)
def test_moments_of_fewer_bits(dtype, stored, eps):
    """One rounding per step; the largest value uses the whole range of the type."""
    parameter = start()
    inner = precise(parameter, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    train(inner, parameter, decoupled=True, steps=1)
    exact = start()
    expected = precise(exact)
    train(expected, exact, decoupled=True, steps=1)
    assert torch.equal(parameter, exact)
    for name in ("exp_avg", "exp_avg_sq"):
        held, full = inner.state[parameter][name], expected.state[exact][name]
        assert held.dtype == stored
        error = inner.get_unscaled_state(parameter, name) - full
        assert 0 < float(error.norm() / full.norm()) < eps
        if dtype == torch.uint8:
            assert float(held.float().abs().max()) == 448


def test_primed_moments_are_exact_in_every_type():
    """Whatever part of a parameter a rank scales."""
    found = []
    for dtype in (torch.float32, torch.uint8, torch.float16, torch.bfloat16):
        parameter = start()
        inner = precise(parameter, exp_avg_dtype=dtype, store_param_remainders=True)
        part = Owned(parameter, inner, inner.param_groups[0])
        place = place_parameter("a.weight", parameter, SINGLE)
        moments.prime([(place, part)], SINGLE, seed=7)
        assert torch.equal(part.weights, parameter)
        found.append(part.state["exp_avg"])
    assert found[0].unique().numel() > 10
    assert all(torch.allclose(one, found[0], rtol=1e-6, atol=1e-8) for one in found[1:])


def test_a_restored_step_has_its_scales_again():
    """What is stored means nothing without them."""
    parameter = start()
    inner = precise(parameter, exp_avg_dtype=torch.float16)
    train(inner, parameter, decoupled=True, steps=1)
    before = inner.get_unscaled_state(parameter, "exp_avg").clone()
    leaf = torch.nn.Module()
    leaf.optimizer = inner
    snapshot = Snapshot([], leaf)
    train(inner, parameter, decoupled=True, steps=2)
    assert not torch.equal(inner.get_unscaled_state(parameter, "exp_avg"), before)
    snapshot.restore()
    assert torch.equal(inner.get_unscaled_state(parameter, "exp_avg"), before)


@pytest.mark.parametrize(
    "options", [{"amsgrad": True}, {"capturable": True}, {"master_weight_dtype": torch.float16}]
)
def test_what_is_not_offered_is_refused(options):
    with pytest.raises(NotImplementedError):
        precise(start(), **options)


def test_parameters_without_gradient_have_state():
    """As in TransformerEngine: a rank whose part is empty has the same keys as all others."""
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.empty(0))]
    weights[0].grad = torch.ones(3)
    adam = FusedAdam(weights)
    adam.step()
    assert [sorted(adam.state[weight]) for weight in weights] == [["exp_avg", "exp_avg_sq"]] * 2
