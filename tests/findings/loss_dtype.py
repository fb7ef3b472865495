# SPDX-License-Identifier: Apache-2.0
"""The dtype of the gradient of float32 logits (finding 45)."""

import torch
from megatron.core.fusions.fused_cross_entropy import calculate_gradients

softmax, mask = torch.full((2, 1, 4), 0.25), torch.zeros(2, 1, dtype=torch.bool)
print(calculate_gradients(softmax, torch.ones(2, 1), mask, torch.zeros(2, dtype=torch.int64)).dtype)
