# SPDX-License-Identifier: Apache-2.0
"""Gradients that Megatron keeps from step to step."""

import torch
from torch import nn

from megatron_ttrace.mcore.statistics import leave_gradients


def test_gradients_of_a_step_before():
    """Those in buckets are filled; a wrapper without buckets, and other parameters, are left."""
    ours, others = nn.Linear(2, 2), nn.Linear(2, 2)
    ours.bucket_groups = [object()]
    ours.weight.main_grad, others.weight.main_grad = torch.zeros(2, 2), torch.zeros(2, 2)
    leave_gradients([ours, others])
    assert ours.weight.main_grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert not others.weight.main_grad.any()
