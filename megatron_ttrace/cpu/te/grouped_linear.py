# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``GroupedLinear``: one linear layer per expert, on consecutive tokens."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ttrace.cpu.te import delayed_wgrad
from megatron_ttrace.cpu.te.base import InitMethod, TransformerEngineBaseModule, default_init
from megatron_ttrace.cpu.te.linear import refuse_delayed
from megatron_ttrace.cpu.te.products import (
    Operand,
    Precision,
    bias_gradient,
    flat,
    forward_product,
    input_gradient,
    weight_gradient,
)
from megatron_ttrace.trace.errors import TTraceError

_SINGLE = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"


@dataclass(frozen=True)
class GroupedSettings:
    """What the autograd function of one call needs besides tensors."""

    precision: Precision
    #: Number of tokens of each expert.
    splits: list[int]
    save_original_input: bool = False
    delayed: delayed_wgrad.Queue | None = None
    with_bias: bool = False


class GroupedLinearFunction(torch.autograd.Function):
    """``x_i @ weight_iᵀ + bias_i`` for each expert's tokens ``x_i``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, settings: GroupedSettings, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """``[tokens, k]`` to ``[tokens, n]``; weights, then biases, are in ``parameters``."""
        count = len(settings.splits)
        weights, biases = parameters[:count], parameters[count:]
        precision = settings.precision
        outputs, inputs, rounded_weights = [], [], []
        for index, rows in enumerate(x.split(settings.splits)):
            operand = precision.input(rows, index)
            weight = precision.weight(weights[index], index)
            output = forward_product(operand, weight, x.dtype)
            outputs.append(output + biases[index] if settings.with_bias else output)
            inputs.append(operand.columnwise)
            if precision.quantized:
                rounded_weights.append(weight.columnwise)
        ctx.keep_rounded = not (settings.save_original_input or precision.wgrad_in_high_precision)
        kept = inputs if ctx.keep_rounded else [x]
        ctx.save_for_backward(*kept, *weights, *rounded_weights)
        ctx.settings, ctx.kept = settings, len(kept)
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the input, of the weights and of the biases."""
        settings: GroupedSettings = ctx.settings
        precision, count = settings.precision, len(settings.splits)
        saved = ctx.saved_tensors
        kept, weights = saved[: ctx.kept], saved[ctx.kept : ctx.kept + count]
        columnwise = saved[ctx.kept + count :] or weights
        inputs = kept if ctx.keep_rounded else kept[0].split(settings.splits)
        grads = grad_output.split(settings.splits)
        operands = [precision.grad_output(grad, index) for index, grad in enumerate(grads)]
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = torch.cat(
                [
                    input_gradient(operand, Operand(weight, column), grad_output.dtype)
                    for operand, weight, column in zip(operands, weights, columnwise, strict=True)
                ]
            )

        grad_parameters: list[torch.Tensor | None] = []
        for index, rows in enumerate(inputs):

            def compute(index: int = index, rows: torch.Tensor = rows) -> torch.Tensor:
                if ctx.keep_rounded:
                    total = Operand(rows, rows)
                elif precision.wgrad_in_high_precision:
                    total = Operand(rows, rows)
                    operands[index] = Operand(grads[index], grads[index])
                else:
                    total = precision.input(rows, index, again=True)
                return weight_gradient(operands[index], total, weights[index].dtype)

            if ctx.needs_input_grad[2 + index]:
                grad_parameters.append(delayed_wgrad.now_or_later(settings.delayed, compute))
            else:
                grad_parameters.append(None)
        if settings.with_bias:
            grad_parameters += [bias_gradient(grad, weights[0].dtype) for grad in grads]
        precision.after_backward()
        return grad_input, None, *grad_parameters


def _refuse_single(asked: bool) -> None:
    """Refuse one parameter for all experts, where TransformerEngine would make it."""
    if asked and os.environ.get(_SINGLE, "0") != "0":
        raise TTraceError(
            "one weight for all experts (--moe-single-grouped-weight) is not emulated on a CPU: "
            "drop the option for this check"
        )


class GroupedLinear(TransformerEngineBaseModule):
    """Linear layers ``weight0``, ``weight1``, … of equal shape.

    Megatron's token dispatcher does the communication of experts, so this layer does none.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError("GroupedLinear does not overlap communication")
        if tp_size > 1 and bias:
            raise ValueError("GroupedLinear with tensor parallelism takes no bias")
        _refuse_single(single_grouped_weight or single_grouped_bias)
        dtype = params_dtype or torch.get_default_dtype()
        self.num_gemms = num_gemms
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.save_original_input = save_original_input
        for index in range(num_gemms):
            shape = (self.out_features, self.in_features)
            init = init_method or default_init
            # Not marked as divided, as in TransformerEngine. Megatron before 0.19 does not mark
            # them either, and counts a gradient norm by the mark.
            self.add_parameter(f"weight{index}", shape, dtype, device, init, tracked=True)
            if bias:
                zero = torch.nn.init.zeros_
                self.add_parameter(f"bias{index}", shape[:1], dtype, device, zero)
            else:
                setattr(self, f"bias{index}", torch.Tensor())
        if delay_wgrad_compute:
            self.delay_gradients(*(f"weight{index}" for index in range(num_gemms)))

    def forward(
        self, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None
    ) -> Any:
        """``[tokens, k]`` to ``[tokens, n]``; ``m_splits`` are the numbers of tokens per expert."""
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if len(splits) != self.num_gemms:
            raise ValueError(f"{len(splits)} splits for {self.num_gemms} experts")
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        settings = GroupedSettings(
            precision=self.precision(self.num_gemms),
            splits=[int(size) for size in splits],
            save_original_input=self.save_original_input,
            delayed=self.wgrad_queue,
            with_bias=self.apply_bias,
        )
        refuse_delayed(settings.precision, self.save_original_input)
        parameters = weights + biases if self.apply_bias else weights
        output = GroupedLinearFunction.apply(flat(inp), settings, *parameters)
        output = output.view(*inp.shape[:-1], output.shape[-1])
        return (output, biases) if self.return_bias else output
