# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``GroupedLinear``: one linear layer per expert, on consecutive tokens."""

import functools
import os
from typing import Any

import torch

from megatron_ttrace.cpu.te.base import InitMethod, now_or_later
from megatron_ttrace.cpu.te.distributed_weight import gathered, gradient_dtype, scattered
from megatron_ttrace.cpu.te.fp8 import decode_state, encode_state
from megatron_ttrace.cpu.te.linear import LinearSettings, ParallelLinear, refuse_delayed
from megatron_ttrace.cpu.te.precision import (
    Operand,
    bias_gradient,
    flat,
    forward_product,
    input_gradient,
    weight_gradient,
)
from megatron_ttrace.trace.errors import TTraceError

_SINGLE = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"


class GroupedLinearFunction(torch.autograd.Function):
    """``x_i @ weight_iᵀ + bias_i`` for each expert's tokens ``x_i``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        settings: LinearSettings,
        splits: list[int],
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """``[tokens, k]`` to ``[tokens, n]``; ``splits`` are numbers of tokens of the experts.

        Weights, then biases, are in ``parameters``.
        """
        count = len(splits)
        weights, biases = parameters[:count], parameters[count:]
        precision, whole = settings.precision, gathered(weights)
        outputs, inputs, rounded_weights = [], [], []
        for index, rows in enumerate(x.split(splits)):
            operand = precision.input(rows, index)
            weight = settings.weight(whole[index], index)
            output = forward_product(operand, weight, x.dtype)
            outputs.append(output + biases[index] if biases else output)
            inputs.append(operand.columnwise)
            if precision.quantized:
                rounded_weights.append(weight.columnwise)
        ctx.keep_rounded = not (settings.save_original_input or precision.wgrad_in_high_precision)
        kept = inputs if ctx.keep_rounded else [x]
        ctx.save_for_backward(*kept, *weights, *rounded_weights)
        ctx.settings, ctx.splits, ctx.kept = settings, splits, len(kept)
        ctx.with_bias = bool(biases)
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the input, of the weights and of the biases."""
        settings: LinearSettings = ctx.settings
        precision, count = settings.precision, len(ctx.splits)
        saved = ctx.saved_tensors
        kept, weights = saved[: ctx.kept], saved[ctx.kept : ctx.kept + count]
        rounded_weights = saved[ctx.kept + count :]
        inputs = kept if ctx.keep_rounded else kept[0].split(ctx.splits)
        grads = grad_output.split(ctx.splits)
        operands = [precision.grad_output(grad, index) for index, grad in enumerate(grads)]
        grad_input = None
        if ctx.needs_input_grad[0]:
            whole = gathered(weights, backward=True)
            grad_input = torch.cat(
                [
                    input_gradient(operand, Operand(weight, column), grad_output.dtype)
                    for operand, weight, column in zip(
                        operands, whole, rounded_weights or whole, strict=True
                    )
                ]
            )
        dtype = gradient_dtype(weights)

        def compute(index: int) -> torch.Tensor:
            rows, operand = inputs[index], operands[index]
            if ctx.keep_rounded or precision.wgrad_in_high_precision:
                total = Operand(rows, rows)
            else:
                total = precision.input(rows, index, again=True)
            if precision.wgrad_in_high_precision:
                operand = Operand(grads[index], grads[index])
            return weight_gradient(operand, total, dtype)

        computed = [
            now_or_later(settings.delayed, functools.partial(compute, index)) if needed else None
            for index, needed in enumerate(ctx.needs_input_grad[3 : 3 + count])
        ]
        grad_parameters = scattered(weights, computed)
        if ctx.with_bias:
            grad_parameters += [bias_gradient(grad, weights[0].dtype) for grad in grads]
        precision.after_backward()
        return grad_input, None, None, *grad_parameters


def _refuse_single(asked: bool) -> None:
    """Refuse one parameter for all experts, where TransformerEngine would make it."""
    if asked and os.environ.get(_SINGLE, "0") != "0":
        raise TTraceError(
            "one weight for all experts (--moe-single-grouped-weight) is not emulated on a CPU: "
            "drop the option for this check"
        )


_OF_STATE = {"_encode_extra_state": encode_state, "_decode_extra_state": decode_state}
"""Methods of Megatron's grouped layers that pickle."""


class GroupedLinear(ParallelLinear):
    """Linear layers ``weight0``, ``weight1``, … of equal shape.

    Megatron's token dispatcher does the communication of experts, so this layer does none.
    """

    def __init_subclass__(cls) -> None:
        """Megatron divides FP8 state among experts and joins it: read and written in our form."""
        super().__init_subclass__()
        for name, ours in _OF_STATE.items():
            if name in vars(cls):
                setattr(cls, name, staticmethod(ours))

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        **options: Any,
    ) -> None:
        if options.get("ub_overlap_rs") or options.get("ub_overlap_ag"):
            raise ValueError("GroupedLinear does not overlap communication")
        if options.get("tp_size", 1) > 1 and options.get("bias", True):
            raise ValueError("GroupedLinear with tensor parallelism takes no bias")
        _refuse_single(single_grouped_weight or single_grouped_bias)
        self.num_gemms = num_gemms
        super().__init__(in_features, out_features, **options)

    def make_parameters(self, dtype: torch.dtype, device: Any, init: InitMethod) -> None:
        """Make the weights ``[n, k]`` and the biases ``[n]``, which are empty without.

        Weights are not marked as divided, as in TransformerEngine. Megatron before 0.19 does not
        mark them either, and counts a gradient norm by the mark.
        """
        shape, zeros = (self.out_features, self.in_features), torch.nn.init.zeros_
        for index in range(self.num_gemms):
            self.add_parameter(f"weight{index}", shape, dtype, device, init, tracked=True)
            if self.use_bias:
                self.add_parameter(f"bias{index}", shape[:1], dtype, device, zeros)
            else:
                setattr(self, f"bias{index}", torch.Tensor())

    def product_weights(self) -> list[Any]:
        """One weight for each expert."""
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    def forward(
        self, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None
    ) -> Any:
        """``[tokens, k]`` to ``[tokens, n]``; ``m_splits`` are the numbers of tokens per expert."""
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if len(splits) != self.num_gemms:
            raise ValueError(f"{len(splits)} splits for {self.num_gemms} experts")
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        settings = self.settings(inp, is_first_microbatch, num_gemms=self.num_gemms)
        refuse_delayed(settings.precision, self.save_original_input)
        parameters = self.product_weights() + (biases if self.apply_bias else [])
        sizes = [int(size) for size in splits]
        output = GroupedLinearFunction.apply(flat(inp), settings, sizes, *parameters)
        output = output.view(*inp.shape[:-1], output.shape[-1])
        return (output, biases) if self.return_bias else output
