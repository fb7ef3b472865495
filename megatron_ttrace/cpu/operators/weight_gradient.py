# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that are added where they belong (Apex's ``fused_weight_gradient_mlp_cuda``)."""

from __future__ import annotations

import torch


def wgrad_gemm_accum_fp32(
    inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """``main_grad += grad_output^T inputs``, not rounded before it is added.

    Args:
        inputs: [..., in].
        grad_output: [..., out].
        main_grad: [out, in], changed in place.
    """
    product = grad_output.flatten(0, -2).float().mT @ inputs.flatten(0, -2).float()
    main_grad.add_(product.to(main_grad.dtype))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
"""The same for a 16-bit ``main_grad``."""
