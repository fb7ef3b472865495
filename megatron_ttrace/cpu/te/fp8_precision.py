# SPDX-License-Identifier: Apache-2.0
"""What each FP8 recipe makes of the tensors of one layer.

Forward tensors are E4M3; gradients are E5M2 with the hybrid format. A layer's tensors have slots:
the input of each of its products, then the weight of each; likewise the gradients.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_ttrace.cpu.te import quantize
from megatron_ttrace.cpu.te.products import Operand, flat
from megatron_ttrace.cpu.te.recipes import Format, Recipe

FORWARD = torch.float8_e4m3fn


def backward_dtype(recipe: Recipe) -> torch.dtype:
    """Eight-bit type of gradients."""
    return torch.float8_e5m2 if recipe.fp8_format is Format.HYBRID else torch.float8_e4m3fn


class FP8Precision:
    """Base class: which type, and whether weight gradients are computed in FP8."""

    quantized = True
    scales_are_delayed = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.backward_dtype = backward_dtype(recipe)
        override = getattr(recipe, "override_linear_precision", (False, False, False))
        self.wgrad_in_high_precision = bool(override[2])

    def after_backward(self) -> None:
        """Called at the end of the layer's backward pass."""


class CurrentScaling(FP8Precision):
    """One scale a tensor, from its own largest value."""

    def _operand(self, tensor: torch.Tensor, fp8: torch.dtype) -> Operand:
        result = quantize.current_scaling(tensor, fp8)
        return Operand(result, result)

    def input(self, tensor: torch.Tensor, index: int = 0, again: bool = False) -> Operand:
        """Round ``[..., k]``."""
        return self._operand(tensor, FORWARD)

    def weight(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round ``[n, k]``."""
        return self._operand(tensor, FORWARD)

    def grad_output(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round ``[..., n]``."""
        return self._operand(tensor, self.backward_dtype)


class BlockScaling(FP8Precision):
    """A power of two for each ``1 x length`` of the summed dim; square blocks for weights."""

    def __init__(self, recipe: Recipe, length: int, square_weights: bool) -> None:
        super().__init__(recipe)
        self.length = length
        self.square_weights = square_weights

    def _operand(self, tensor: torch.Tensor, fp8: torch.dtype) -> Operand:
        matrix = flat(tensor)
        along = quantize.block_scaling(matrix, (1, self.length), fp8)
        across = quantize.block_scaling(matrix, (self.length, 1), fp8)
        return Operand(along.view(tensor.shape), across.view(tensor.shape))

    def input(self, tensor: torch.Tensor, index: int = 0, again: bool = False) -> Operand:
        """Round ``[..., k]``."""
        return self._operand(tensor, FORWARD)

    def weight(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round ``[n, k]``."""
        if not self.square_weights:
            return self._operand(tensor, FORWARD)
        result = quantize.block_scaling(tensor, (self.length, self.length), FORWARD)
        return Operand(result, result)

    def grad_output(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round ``[..., n]``."""
        return self._operand(tensor, self.backward_dtype)


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


class DelayedScalingPrecision(FP8Precision):
    """One scale a tensor, fixed before the pass; largest values are recorded for later ones.

    The scales of the forward pass are those at its start, also when an input is rounded once more
    in the backward pass. A recomputed forward pass gets the scales of the first and records
    nothing.
    """

    scales_are_delayed = True

    def __init__(
        self,
        recipe: Recipe,
        forward: ScalingState,
        backward: ScalingState,
        num_gemms: int,
        scale: torch.Tensor,
        recording: bool,
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__(recipe)
        self._forward, self._backward = forward, backward
        self._num_gemms, self._scale, self._recording = num_gemms, scale, recording
        self._finish = finish

    def _forward_operand(self, tensor: torch.Tensor, slot: int, record: bool) -> Operand:
        if record:
            self._forward.record(slot, tensor)
        result = quantize.rounded(tensor, self._scale[slot], FORWARD)
        return Operand(result, result)

    def input(self, tensor: torch.Tensor, index: int = 0, again: bool = False) -> Operand:
        """Round ``[..., k]``."""
        return self._forward_operand(tensor, index, self._recording and not again)

    def weight(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round ``[n, k]``."""
        return self._forward_operand(tensor, self._num_gemms + index, self._recording)

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
