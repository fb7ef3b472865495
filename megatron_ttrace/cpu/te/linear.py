# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``Linear``: it does its own tensor-parallel communication."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ttrace.cpu.te import delayed_wgrad, overlap
from megatron_ttrace.cpu.te.base import InitMethod, TransformerEngineBaseModule, default_init
from megatron_ttrace.cpu.te.parallel import TensorParallel, gather_along_first_dim
from megatron_ttrace.cpu.te.products import (
    Operand,
    Precision,
    bias_gradient,
    flat,
    forward_product,
    input_gradient,
    weight_gradient,
)


@dataclass(frozen=True)
class LinearSettings:
    """What the autograd function of one call needs besides tensors."""

    layout: TensorParallel
    precision: Precision
    #: Keep the input itself for the backward pass, and round it again there.
    save_original_input: bool = False
    #: Name of the communication buffer that the gathered input goes to; none without overlap.
    buffer: str | None = None
    #: Takes the weight gradient's computation when it is to run after the backward pass.
    delayed: delayed_wgrad.Queue | None = None


def require_fp8_sizes(x: torch.Tensor, weight: torch.Tensor, settings: LinearSettings) -> None:
    """Refuse what TransformerEngine does not compute in FP8, so that what runs here runs there.

    Raises:
        ValueError: for sizes that the kernels do not take, and combinations that are not supported.
    """
    precision = settings.precision
    if not precision.quantized:
        return
    for tensor in (x, weight):
        if flat(tensor).shape[0] % 8 or tensor.shape[-1] % 16:
            raise ValueError(
                "FP8 needs the last dim to be a multiple of 16 and the product of the others a "
                f"multiple of 8, and gets {list(tensor.shape)}"
            )
    refuse_delayed(precision, settings.save_original_input)


def refuse_delayed(precision: Precision, save_original_input: bool) -> None:
    """Refuse to round an input again later where the scales will have changed by then."""
    if save_original_input and precision.scales_are_delayed:
        raise ValueError("save_original_input is not supported with delayed scaling")


def gather_input(x: torch.Tensor, settings: LinearSettings) -> torch.Tensor:
    """Make the input ``[s / tp, ..., k]`` of a column-parallel layer whole along the sequence."""
    if not settings.layout.gathers_input:
        return x
    if settings.buffer is not None:
        return overlap.gather_into_buffer(x, settings.layout.group, settings.buffer)
    return gather_along_first_dim(x, settings.layout.group)


def reduce_output(partial: torch.Tensor, layout: TensorParallel) -> torch.Tensor:
    """Sum a row-parallel layer's partial outputs ``[s, ..., n]`` over the ranks."""
    return layout.sum(partial) if layout.row else partial


def reduce_grad_input(partial: torch.Tensor, layout: TensorParallel) -> torch.Tensor:
    """Sum a column-parallel layer's partial input gradients ``[s, ..., k]`` over the ranks."""
    return layout.sum(partial) if layout.column else partial


def grad_output_operand(grad_output: torch.Tensor, settings: LinearSettings) -> Operand:
    """Make the gradient of a row-parallel output whole along the sequence, and round it."""
    if settings.layout.gathers_grad_output:
        grad_output = gather_along_first_dim(grad_output, settings.layout.group)
    return settings.precision.grad_output(grad_output)


def unrounded_grad_output(grad_output: torch.Tensor, settings: LinearSettings) -> Operand:
    """Make the gradient whole for a weight gradient in high precision."""
    if settings.layout.gathers_grad_output:
        grad_output = gather_along_first_dim(grad_output, settings.layout.group)
    return Operand(grad_output, grad_output)


class LinearFunction(torch.autograd.Function):
    """``x @ weightᵀ + bias`` with its communication."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: LinearSettings,
    ) -> torch.Tensor:
        """``[s, ..., k]`` to ``[s', ..., n]``; they differ with sequence parallelism."""
        require_fp8_sizes(x, weight, settings)
        total = gather_input(x, settings)
        operand = settings.precision.input(total)
        weight_operand = settings.precision.weight(weight)
        output = forward_product(operand, weight_operand, x.dtype)
        output = reduce_output(output, settings.layout)
        if bias is not None:
            output = output + bias

        # A gathered input is not kept: each rank keeps its part and gathers again. What was
        # rounded is kept as it was rounded, unless asked for otherwise.
        keep_rounded = not (
            settings.save_original_input or settings.precision.wgrad_in_high_precision
        )
        ctx.save_for_backward(
            operand.columnwise if keep_rounded else x,
            weight,
            weight_operand.columnwise if settings.precision.quantized else None,
        )
        ctx.keep_rounded, ctx.settings = keep_rounded, settings
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input, weight and bias."""
        saved, weight, weight_columnwise = ctx.saved_tensors
        settings: LinearSettings = ctx.settings
        layout = settings.layout
        operand = grad_output_operand(grad_output, settings)

        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            columnwise = weight if weight_columnwise is None else weight_columnwise
            grad_input = input_gradient(operand, Operand(weight, columnwise), grad_output.dtype)
            grad_input = reduce_grad_input(grad_input, layout)
        if ctx.needs_input_grad[2]:
            # From this rank's own rows: with sequence parallelism Megatron sums the gradient of
            # a row-parallel bias, which is marked for it.
            grad_bias = bias_gradient(grad_output, ctx.bias_dtype)
        if ctx.needs_input_grad[1]:

            def compute() -> torch.Tensor:
                return linear_weight_gradient(
                    saved, ctx.keep_rounded, operand, grad_output, settings, weight.dtype
                )

            grad_weight = delayed_wgrad.now_or_later(settings.delayed, compute)
        settings.precision.after_backward()
        return grad_input, grad_weight, grad_bias, None


def linear_weight_gradient(
    saved: torch.Tensor,
    saved_is_rounded: bool,
    grad_operand: Operand,
    grad_output: torch.Tensor,
    settings: LinearSettings,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Weight gradient ``[n, k]`` from the saved input, gathered again if it is one rank's part."""
    if saved_is_rounded:
        total = Operand(saved, saved)
    else:
        whole = saved
        if settings.layout.gathers_input:
            whole = gather_along_first_dim(saved, settings.layout.group)
        if settings.precision.wgrad_in_high_precision:
            total = Operand(whole, whole)
            grad_operand = unrounded_grad_output(grad_output, settings)
        else:
            total = settings.precision.input(whole, again=True)
    return weight_gradient(grad_operand, total, dtype)


class Linear(TransformerEngineBaseModule):
    """A linear layer; ``parallel_mode`` is "column", "row" or none."""

    weight: torch.nn.Parameter
    bias: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        rng_tracker_name: str | None = None,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        dtype = params_dtype or torch.get_default_dtype()
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
        self.ub_overlap_ag = ub_overlap_ag or ub_overlap_rs_dgrad or ub_bulk_dgrad
        self.ub_name = ub_name

        self.add_parameter(
            "weight",
            (self.out_features, self.in_features),
            dtype,
            device,
            init_method or default_init,
            tracked=True,
        )
        if delay_wgrad_compute:
            self.delay_gradients("weight")
        # Marked in any case, as by TransformerEngine: Megatron before 0.19 gives experts no mode,
        # and counts a gradient norm by the mark.
        self.mark_partitioned(self.weight, 1 if parallel_mode == "row" else 0)
        if bias:
            self.add_parameter("bias", (self.out_features,), dtype, device, torch.nn.init.zeros_)
            self.mark_bias(self.bias)
        else:
            self.bias = torch.Tensor()

    def settings(self) -> LinearSettings:
        """Fix layout and precision for one call."""
        return LinearSettings(
            layout=self.layout(),
            precision=self.precision(),
            save_original_input=self.save_original_input,
            buffer=self.ub_name if self.ub_overlap_ag else None,
            delayed=self.wgrad_queue,
        )

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False
    ) -> Any:
        """``[s, ..., k]`` to ``[s', ..., n]``, and the bias if ``return_bias``.

        ``is_first_microbatch`` says when a rounded weight may be taken from a cache; rounding
        it again gives the same.
        """
        bias = self.bias if self.apply_bias else None
        output = LinearFunction.apply(inp, self.weight, bias, self.settings())
        return (output, self.bias) if self.return_bias else output
