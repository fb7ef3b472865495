# SPDX-License-Identifier: Apache-2.0
"""The three matrix products of a linear layer, and what each FP8 recipe makes of their operands.

A block-scaled FP8 tensor is rounded differently along its rows and along its columns, because a
product sums along one or the other. So an operand comes in two versions; without FP8, and with one
scale for the whole tensor, both are the same tensor.

Forward tensors are E4M3; gradients are E5M2 with the hybrid format. A layer's tensors have slots:
the input of each of its products, then the weight of each; likewise the gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ttrace.cpu.te import quantize
from megatron_ttrace.cpu.te.norms import compute_dtype
from megatron_ttrace.cpu.te.recipes import Format, Recipe

FORWARD = torch.float8_e4m3fn


def backward_dtype(recipe: Recipe) -> torch.dtype:
    """Eight-bit type of gradients."""
    return torch.float8_e5m2 if recipe.fp8_format is Format.HYBRID else torch.float8_e4m3fn


@dataclass(frozen=True)
class Operand:
    """A matrix as the product that sums along its last dim, or along its first, sees it."""

    rowwise: torch.Tensor
    columnwise: torch.Tensor


class Precision:
    """Turns the tensors of one layer into operands; this base class does not round."""

    #: Whether operands differ from the tensors they were made from.
    quantized = False
    #: Whether the weight gradient is computed from unrounded tensors.
    wgrad_in_high_precision = True
    #: Whether scales come from earlier passes.
    scales_are_delayed = False
    #: Eight-bit type of gradients.
    backward_dtype = FORWARD

    def input(self, tensor: torch.Tensor, index: int = 0, again: bool = False) -> Operand:
        """Round ``[..., k]``, the ``index``-th group of the input; ``again`` in backward."""
        return self._operand(tensor, FORWARD)

    def weight(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round the ``index``-th weight ``[n, k]``."""
        return self._operand(tensor, FORWARD)

    def grad_output(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round ``[..., n]``, the ``index``-th group of the gradient of the output."""
        return self._operand(tensor, self.backward_dtype)

    def after_backward(self) -> None:
        """Called at the end of the layer's backward pass."""

    def _operand(self, tensor: torch.Tensor, fp8: torch.dtype) -> Operand:
        return Operand(tensor, tensor)


class CurrentScaling(Precision):
    """One scale a tensor, from its own largest value; base class of the other recipes."""

    quantized = True

    def __init__(self, recipe: Recipe) -> None:
        self.backward_dtype = backward_dtype(recipe)
        override = getattr(recipe, "override_linear_precision", (False, False, False))
        self.wgrad_in_high_precision = bool(override[2])

    def _operand(self, tensor: torch.Tensor, fp8: torch.dtype) -> Operand:
        result = quantize.current_scaling(tensor, fp8)
        return Operand(result, result)


class BlockScaling(CurrentScaling):
    """A power of two for each ``1 x length`` of the summed dim; square blocks for weights."""

    def __init__(self, recipe: Recipe, length: int, square_weights: bool) -> None:
        super().__init__(recipe)
        self.length, self.square_weights = length, square_weights

    def _operand(self, tensor: torch.Tensor, fp8: torch.dtype) -> Operand:
        matrix = flat(tensor)
        along = quantize.block_scaling(matrix, (1, self.length), fp8)
        across = quantize.block_scaling(matrix, (self.length, 1), fp8)
        return Operand(along.view(tensor.shape), across.view(tensor.shape))

    def weight(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round ``[n, k]``."""
        if not self.square_weights:
            return self._operand(tensor, FORWARD)
        result = quantize.block_scaling(tensor, (self.length, self.length), FORWARD)
        return Operand(result, result)


class ScalingState:
    """Scales and histories of largest values of a layer's tensors in one direction.

    ``scale`` is ``[slots]``; ``amax_history`` is ``[length, slots]``, whose first row collects the
    current iteration's largest values.
    """

    def __init__(self, slots: int, history_length: int) -> None:
        self.scale = torch.ones(slots)
        self.amax_history = torch.zeros(history_length, slots)

    def record(self, slot: int, tensor: torch.Tensor) -> None:
        """Note the largest value of a tensor."""
        row = self.amax_history[0]
        row[slot] = torch.maximum(row[slot], quantize.amax(tensor))

    def update(self, algorithm: Any, fp8_max: float, margin: int) -> None:
        """Take the next scales from the history, and start a new row."""
        if callable(algorithm):
            largest = algorithm(self.amax_history)
        elif algorithm == "max":
            largest = self.amax_history.amax(0)
        else:
            largest = self.amax_history[0].clone()
        self.scale = quantize.scale_from_amax(largest, fp8_max, old=self.scale, margin=margin)
        if self.amax_history.shape[0] > 1:
            self.amax_history = torch.roll(self.amax_history, -1, 0)
        self.amax_history[0] = 0.0


class DelayedScalingPrecision(CurrentScaling):
    """One scale a tensor, fixed before the pass; largest values are recorded for later ones.

    The scales of the forward pass are those at its start (``scale``), also when an input is rounded
    once more in the backward pass. A recomputed forward pass gets the scales of the first and
    records nothing. ``finish`` runs after the backward pass, if this layer's is the last.
    """

    scales_are_delayed = True

    def __init__(
        self,
        recipe: Recipe,
        states: tuple[ScalingState, ScalingState],
        *,
        scale: torch.Tensor,
        num_gemms: int,
        recording: bool,
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__(recipe)
        self._state, self._backward = states
        self._scale, self._num_gemms = scale, num_gemms
        self._recording, self._finish = recording, finish

    def _forward(self, tensor: torch.Tensor, slot: int, record: bool) -> Operand:
        if record:
            self._state.record(slot, tensor)
        result = quantize.rounded(tensor, self._scale[slot], FORWARD)
        return Operand(result, result)

    def input(self, tensor: torch.Tensor, index: int = 0, again: bool = False) -> Operand:
        """Round ``[..., k]``."""
        return self._forward(tensor, index, self._recording and not again)

    def weight(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round ``[n, k]``."""
        return self._forward(tensor, self._num_gemms + index, self._recording)

    def grad_output(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round ``[..., n]``."""
        scale = self._backward.scale[index]
        self._backward.record(index, tensor)
        result = quantize.rounded(tensor, scale, self.backward_dtype)
        return Operand(result, result)

    def after_backward(self) -> None:
        """Update the scales of gradients, if this layer's backward pass is the last."""
        if self._finish is not None:
            self._finish()


def forward_product(x: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``x @ weightᵀ``: ``[..., k]`` and ``[n, k]`` give ``[..., n]``."""
    return torch.matmul(x.rowwise, weight.rowwise.t()).to(dtype)


def input_gradient(grad_output: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``grad_output @ weight``: ``[..., n]`` and ``[n, k]`` give ``[..., k]``."""
    return torch.matmul(grad_output.rowwise, weight.columnwise).to(dtype)


def weight_gradient(grad_output: Operand, x: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``grad_outputᵀ @ x`` over all tokens: ``[..., n]`` and ``[..., k]`` give ``[n, k]``."""
    return torch.matmul(flat(grad_output.columnwise).t(), flat(x.columnwise)).to(dtype)


def bias_gradient(grad_output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum ``[..., n]`` over all tokens, in float32 at least."""
    return flat(grad_output).sum(0, dtype=compute_dtype(grad_output.dtype)).to(dtype)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` as ``[tokens, n]``."""
    return tensor.reshape(-1, tensor.shape[-1])
