# SPDX-License-Identifier: Apache-2.0
"""Gradients that Megatron keeps from step to step."""

import torch
from torch import nn

from megatron_ttrace.mcore.statistics import leave_gradients, zero_gradients


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
