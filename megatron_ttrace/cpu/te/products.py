# SPDX-License-Identifier: Apache-2.0
"""The three matrix products of a linear layer, on operands that may have been rounded to FP8.

A block-scaled FP8 tensor is rounded differently along its rows and along its columns, because a
product sums along one or the other. So an operand comes in two versions; without FP8, and with one
scale for the whole tensor, both are the same tensor.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Operand:
    """A matrix as the product that sums along its last dim, or along its first, sees it."""

    rowwise: torch.Tensor
    columnwise: torch.Tensor


class Precision(Protocol):
    """Turns the tensors of one layer into operands; :class:`HighPrecision` or FP8."""

    #: Whether operands differ from the tensors they were made from.
    quantized: bool
    #: Whether the weight gradient is computed from unrounded tensors.
    wgrad_in_high_precision: bool
    #: Whether scales come from earlier passes.
    scales_are_delayed: bool

    def input(self, tensor: torch.Tensor, index: int = 0, again: bool = False) -> Operand:
        """Round the input, or the ``index``-th group of its rows; ``again`` in backward."""

    def weight(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round the weight, or the ``index``-th one."""

    def grad_output(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round the gradient of the output, or the ``index``-th group of its rows."""

    def after_backward(self) -> None:
        """Do what has to be done at the end of the layer's backward pass."""


class HighPrecision:
    """No rounding: the tensors are the operands."""

    quantized = False
    wgrad_in_high_precision = True
    scales_are_delayed = False

    def input(self, tensor: torch.Tensor, index: int = 0, again: bool = False) -> Operand:
        """Return the tensor."""
        return Operand(tensor, tensor)

    def weight(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Return the tensor."""
        return Operand(tensor, tensor)

    def grad_output(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Return the tensor."""
        return Operand(tensor, tensor)

    def after_backward(self) -> None:
        """Nothing to do."""


def _result(product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return product if product.dtype == dtype else product.to(dtype)


def forward_product(x: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``x @ weightᵀ``: ``[..., k]`` and ``[n, k]`` give ``[..., n]``."""
    return _result(torch.matmul(x.rowwise, weight.rowwise.t()), dtype)


def input_gradient(grad_output: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``grad_output @ weight``: ``[..., n]`` and ``[n, k]`` give ``[..., k]``."""
    return _result(torch.matmul(grad_output.rowwise, weight.columnwise), dtype)


def weight_gradient(grad_output: Operand, x: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``grad_outputᵀ @ x`` over all tokens: ``[..., n]`` and ``[..., k]`` give ``[n, k]``."""
    dy, total = grad_output.columnwise, x.columnwise
    return _result(torch.matmul(flat(dy).t(), flat(total)), dtype)


def bias_gradient(grad_output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum ``[..., n]`` over all tokens, in float32 at least."""
    accumulate = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
    return flat(grad_output).sum(0, dtype=accumulate).to(dtype)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` as ``[tokens, n]``."""
    return tensor.reshape(-1, tensor.shape[-1])
