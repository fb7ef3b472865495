# SPDX-License-Identifier: Apache-2.0
"""Start values for the moments of optimizers."""

from functools import partial

import numpy as np
import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from emerging_optimizers.scalar_optimizers import Lion
from emerging_optimizers.soap import SOAP

from megatron_ttrace.mcore.optimizer import Owned
from megatron_ttrace.mcore.parameters import ParameterPlace, place_parameter
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run.start import moments
from tests.mcore.test_parameters import FC1, parameter, sharded
from tests.placement.by_hand import gated_chunk
from tests.placement.meshes import mesh_of


class TensorParallelMuon(Muon):
    """Named like Megatron's, whose import takes seconds."""


class FusedAdam(torch.optim.AdamW):
    """Apex's and TransformerEngine's keep the step in the group."""


def primed(main, optimizer=torch.optim.AdamW, *, place=None, mesh=SINGLE, flat=None, **how):
    """An optimizer of one parameter, primed."""
    inner = optimizer([main], lr=0.1)
    part = Owned(main, inner, inner.param_groups[0], flat)
    place = place or place_parameter("a.weight", main, SINGLE)
    moments.prime([(place, part)], mesh, seed=7, **how)
    return inner


@pytest.mark.parametrize(
    ("group", "rate"),
    [
        ({"lr": 0.0, "max_lr": 0.3}, 0.3),
        ({"lr": 0.0}, 0.5),
        ({"lr": 1e-8, "max_lr": 1e-3}, 1e-3),
        ({"lr": 1e-4, "max_lr": 1e-3}, 1e-4),
        ({"lr": 0.3, "max_lr": 0.3}, 0.3),
    ],
)
def test_a_rate_that_shows_faults(group, rate):
    """``--lr-warmup-init 1e-8`` changes a weight by less than its rounding.

    The schedule's own rate, or the full one, may be what an optimizer was built with.
    """
    main = torch.zeros(2)
    part = Owned(main, torch.optim.SGD([main], lr=1.0), group)
    moments.awaken([part, part], 0.5)
    assert group["lr"] == rate * 1.25


def test_a_rate_that_a_kernel_holds():
    main, held = torch.zeros(2), torch.tensor(0.1)
    part = Owned(main, torch.optim.SGD([main], lr=1.0), {"lr": held})
    moments.awaken([part], 0.1)
    assert part.group["lr"] is held


def test_powers_of_two():
    """Where a job's optimizer may have few bits, also an optimizer that has all of them."""
    main = parameter(12, 8)
    for coarse in (False, True):
        mantissas = primed(main, coarse=coarse).state[main]["exp_avg_sq"].frexp().mantissa
        assert bool((mantissas == 0.5).all()) == coarse


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (torch.optim.AdamW, {"exp_avg", "exp_avg_sq", "step"}),
        (
            partial(torch.optim.AdamW, amsgrad=True),
            {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"},
        ),
        (partial(torch.optim.SGD, momentum=0.9), {"momentum_buffer"}),
        (Lion, {"exp_avg"}),
        (TensorParallelMuon, {"momentum_buffer"}),
        (SOAP, {"exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R", "step"}),
    ],
)
@torch._dynamo.config.patch(disable=True)
def test_updates_are_smooth(optimizer, names):
    """Rounding in the gradient moves an update little: no sign flips, no basis turns.

    Every element is changed.
    """
    updates = []
    torch.manual_seed(0)
    gradient, noise = torch.randn(12, 1) @ torch.randn(1, 8), torch.randn(12, 8)
    for rounding in (0.0, 1e-3):
        main = torch.nn.Parameter(torch.zeros(12, 8))
        main.grad = 1e-3 * (gradient + rounding * noise)
        inner = primed(main, optimizer)
        assert set(inner.state[main]) == names
        inner.step()
        updates.append(main.detach().clone())
    assert (updates[0] != 0).all()
    assert float((updates[1] - updates[0]).norm() / updates[0].norm()) < 1e-2


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_moments_of_a_shard_and_of_a_flat_range(optimizer):
    """Whole on one device, a gated half under TP, a range of it under ZeRO: the same numbers."""
    whole = parameter(8, 6)
    place = place_parameter(FC1, whole, SINGLE, stacked=2)
    reference = primed(whole, optimizer, place=place).state[whole]
    for rank in range(2):
        mesh = mesh_of(rank, 2, tp=2)
        half, flat = sharded(4, 6), parameter(13)
        how = {"place": place_parameter(FC1, half, mesh, stacked=2), "mesh": mesh}
        values = primed(half, optimizer, **how).state[half]
        ranged = primed(flat, optimizer, flat=(5, 18), **how).state[flat]
        for name in ("exp_avg", "exp_avg_sq"):
            expected = gated_chunk(reference[name].numpy(), 0, rank, 2)
            np.testing.assert_array_equal(values[name].numpy(), expected)
            np.testing.assert_array_equal(ranged[name].numpy(), expected.reshape(-1)[5:18])
        assert float(values["step"]) == float(ranged["step"]) == moments.STEP


def test_moments_of_padding(monkeypatch):
    """Zero: an optimizer that multiplies matrices would mix it with the weight's rows."""
    monkeypatch.setattr(torch, "empty_like", partial(torch.full_like, fill_value=torch.nan))
    main = parameter(6, 3)
    state = primed(main, place=ParameterPlace("a.weight", (4, 3), ())).state[main]
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].isfinite().all()
        assert [bool(row.any()) for row in state[name]] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_primed_moments_look_like_the_middle_of_a_run(dtype):
    """First moments around zero, second ones positive and near their square, in float32."""
    main = parameter(100, 100, dtype=dtype)
    mean, square = (primed(main).state[main][name] for name in ("exp_avg", "exp_avg_sq"))
    assert mean.dtype == square.dtype == torch.float32
    assert float(mean.std()) == pytest.approx(moments.SCALE, rel=0.05)
    assert abs(float(mean.mean())) < 0.05 * moments.SCALE
    assert float(square.min()) > 0
    assert float(square.mean()) == pytest.approx(moments.SCALE**2, rel=0.05)


def test_fused_optimizers_count_by_group():
    """No step beside the moments."""
    main = parameter(4, 4)
    inner = primed(main, FusedAdam)
    assert inner.param_groups[0]["step"] == moments.STEP
    assert set(inner.state[main]) == {"exp_avg", "exp_avg_sq"}


def test_other_optimizers_are_left_alone():
    """Plain SGD has no moments to prime, and those of a foreign optimizer are unknown."""
    main = parameter(4, 4)
    assert main not in primed(main, torch.optim.SGD).state
    assert primed(main, torch.optim.Adagrad).state[main].keys() == {"step", "sum"}
