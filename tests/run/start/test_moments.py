# SPDX-License-Identifier: Apache-2.0
"""Start values for the moments of optimizers."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from emerging_optimizers.scalar_optimizers import Lion
from emerging_optimizers.soap import SOAP

from megatron_ttrace.mcore.optimizer import Owned
from megatron_ttrace.mcore.parameters import place_parameter
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run.start import moments


class TensorParallelMuon(Muon):
    """Named like Megatron's, whose import takes seconds."""


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
def test_a_rate_with_which_nothing_shows(group, rate):
    """``--lr-warmup-init 1e-8`` changes a weight by less than its rounding."""
    main = torch.zeros(2)
    part = Owned(main, torch.optim.SGD([main], lr=1.0), group)
    moments.awaken([part], 0.5)
    assert group["lr"] == rate


def test_powers_of_two():
    """Where a job's optimizer may have few bits, also an optimizer that has all of them."""
    main = torch.nn.Parameter(torch.zeros(12, 8))
    inner = torch.optim.Adam([main])
    part = Owned(main, inner, inner.param_groups[0])
    place = place_parameter("a.weight", main, SINGLE)
    for coarse in (False, True):
        moments.prime([(place, part)], SINGLE, seed=7, coarse=coarse)
        mantissas = inner.state[main]["exp_avg_sq"].frexp().mantissa
        assert bool((mantissas == 0.5).all()) == coarse


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (lambda mains: torch.optim.AdamW(mains, lr=0.1), {"exp_avg", "exp_avg_sq", "step"}),
        (lambda mains: torch.optim.SGD(mains, lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda mains: Lion(mains, lr=0.1), {"exp_avg"}),
        (lambda mains: TensorParallelMuon(mains, lr=0.1), {"momentum_buffer"}),
        (
            lambda mains: SOAP(mains, lr=0.1),
            {"exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R", "step"},
        ),
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
        inner = optimizer([main])
        part = Owned(main, inner, inner.param_groups[0])
        moments.prime([(place_parameter("a.weight", main, SINGLE), part)], SINGLE, seed=7)
        assert set(inner.state[main]) == names
        inner.step()
        updates.append(main.detach().clone())
    assert (updates[0] != 0).all()
    assert float((updates[1] - updates[0]).norm() / updates[0].norm()) < 1e-2
