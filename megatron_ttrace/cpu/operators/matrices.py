# SPDX-License-Identifier: Apache-2.0
"""Functions of matrices: the Hadamard transform, and weight gradients added where they belong."""

import torch
import torch.nn.functional as F


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``x`` times Sylvester's Hadamard matrix over the last dim, times ``scale``; in float32.

    A last dim that is not a power of two is filled up with zeros, and cut off again.
    """
    size = x.shape[-1]
    padded_size = 1 << (size - 1).bit_length()
    values = F.pad(x.float(), (0, padded_size - size))
    half = 1
    while half < padded_size:
        pairs = values.unflatten(-1, (-1, 2, half))
        first, second = pairs.unbind(-2)
        values = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return (values[..., :size] * scale).to(x.dtype)


@torch.no_grad()
def wgrad_gemm_accum_fp32(
    inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """``main_grad += grad_output^T inputs``, not rounded before it is added; no graph, as a kernel.

    Args:
        inputs: [..., in].
        grad_output: [..., out].
        main_grad: [out, in], changed in place.
    """
    product = grad_output.flatten(0, -2).float().mT @ inputs.flatten(0, -2).float()
    main_grad.add_(product.to(main_grad.dtype))


#: The same for a 16-bit ``main_grad``.
wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
