# SPDX-License-Identifier: Apache-2.0
"""The loss scale of optimizers that are lists of optimizers, and of those without one."""

import types

import pytest
import torch

from megatron_ttrace.mcore import loss_scale
from tests.mcore.test_optimizer import chained


def leaf(value, overflow=0.0):
    """An optimizer with a scaler, as ``MixedPrecisionOptimizer`` has one."""

    class Scaler:
        _scale = torch.tensor([value])

        @property
        def scale(self):
            return self._scale

    return types.SimpleNamespace(grad_scaler=Scaler(), found_inf=torch.tensor([overflow]))


def test_all_parts_get_it():
    """A chained optimizer reads the first one's, each part unscales by its own."""
    optimizer = chained(leaf(4096.0), leaf(4096.0))
    assert loss_scale.get(optimizer) == 4096.0
    loss_scale.put(optimizer, 16.0)
    assert [float(part.grad_scaler.scale) for part in optimizer.chained_optimizers] == [16.0, 16.0]


def test_none_without_a_scaler():
    """A run in bf16 has none, and needs none."""
    optimizer = types.SimpleNamespace(grad_scaler=None)
    assert loss_scale.get(optimizer) is None
    loss_scale.put(optimizer, 16.0)
    assert not loss_scale.overflowed(optimizer)


def test_an_overflow_of_any_part():
    """One is enough for Megatron to skip the step."""
    assert loss_scale.overflowed(chained(leaf(1.0), leaf(1.0, 1.0)))
    assert not loss_scale.overflowed(chained(leaf(1.0), leaf(1.0)))


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, 64.0), (2.0, 32.0), (3.0, 16.0), (4.0, 16.0)]
)
def test_a_candidates_gradients_are_not_larger(factor, expected):
    """Its scale is a power of two below the reference's, by at least its gradients' factor."""
    assert loss_scale.of_candidate(64.0, factor) == expected
