# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``Linear`` and ``LayerNormLinear``, with their tensor-parallel communication.

``LayerNormLinear`` is a norm and the column-parallel layer after it; Megatron uses it for QKV and
for the first half of the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ttrace.cpu.te import overlap
from megatron_ttrace.cpu.te.base import (
    InitMethod,
    Queue,
    TransformerEngineBaseModule,
    default_init,
    now_or_later,
)
from megatron_ttrace.cpu.te.distributed_weight import gathered, gradient_dtype, scattered
from megatron_ttrace.cpu.te.fp8 import makes_fp8_weights
from megatron_ttrace.cpu.te.norms import NormKind, norm_backward, norm_forward
from megatron_ttrace.cpu.te.parallel import TensorParallel, gather_rows
from megatron_ttrace.cpu.te.precision import (
    Operand,
    Precision,
    bias_gradient,
    flat,
    forward_product,
    input_gradient,
    weight_gradient,
)


def _divide(features: int, ranks: int) -> int:
    if features % ranks:
        raise ValueError(f"{features} is not divisible by {ranks}")
    return features // ranks


@dataclass(frozen=True)
class LinearSettings:
    """What the autograd function of one call needs besides tensors."""

    layout: TensorParallel
    precision: Precision
    #: The norm before the product, if there is one.
    norm: NormKind | None = None
    return_normalized: bool = False
    #: Return it as it enters the product: gathered, with sequence parallelism.
    return_gathered: bool = False
    #: Keep the input itself for the backward pass, and round it again there.
    save_original_input: bool = False
    #: Name of the communication buffer that the gathered input goes to; none without overlap.
    buffer: str | None = None
    #: Takes the weight gradient's computation when it is to run after the backward pass.
    delayed: Queue | None = None
    #: Weights as a step's first microbatch rounded them, by number; none if each one does it.
    rounded: dict[int, Operand] | None = None

    @property
    def returns_total(self) -> bool:
        """Whether the norm's output is returned gathered; its gradient is then summed over ranks.

        As TransformerEngine's ``_LayerNormLinear`` (transformer_engine/pytorch/module).
        """
        return self.return_gathered and self.layout.gathers_input

    def weight(self, tensor: torch.Tensor, index: int = 0) -> Operand:
        """Round the ``index``-th weight, or take it as it was rounded before.

        As ``get_weight_workspace`` in transformer_engine/pytorch/module/base.py.
        """
        if self.rounded is None:
            return self.precision.weight(tensor, index)
        if index not in self.rounded:
            self.rounded[index] = self.precision.weight(tensor, index)
        return self.rounded[index]


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


def _gathered(tensor: torch.Tensor, gathers: bool, settings: LinearSettings) -> torch.Tensor:
    """``[s / tp, ...]`` whole along the sequence, if it is cut."""
    return gather_rows(tensor, settings.layout.group) if gathers else tensor


class LinearFunction(torch.autograd.Function):
    """``norm(x) @ weightᵀ + bias`` with its communication; ``x`` itself without a norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: LinearSettings,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, ..., k]`` to ``[s', ..., n]`` and, if asked for, the norm's ``[s, ..., k]``.

        ``s`` and ``s'`` differ with sequence parallelism.
        """
        (whole,) = gathered([weight])
        require_fp8_sizes(x, whole, settings)
        precision, layout = settings.precision, settings.layout
        normalized, mean, inverse = x, None, None
        if settings.norm is not None:
            assert norm_weight is not None
            normalized, mean, inverse = norm_forward(x, norm_weight, norm_bias, settings.norm)
        # First gathered, then rounded: all ranks round the same tensor.
        if layout.gathers_input and settings.buffer is not None:
            total = overlap.gather_into_buffer(normalized, layout.group, settings.buffer)
        else:
            total = _gathered(normalized, layout.gathers_input, settings)
        operand = precision.input(total)
        weight_operand = settings.weight(whole)
        output = forward_product(operand, weight_operand, x.dtype)
        if layout.row:
            output = layout.sum(output)
        if bias is not None:
            output = output + bias

        # A gathered input is not kept: each rank keeps its part and gathers again. What was
        # rounded is kept as it was rounded, unless asked for otherwise.
        keep_rounded = not (settings.save_original_input or precision.wgrad_in_high_precision)
        ctx.save_for_backward(
            None if settings.norm is None else x,
            norm_weight,
            mean,
            inverse,
            operand.columnwise if keep_rounded else normalized,
            weight,
            weight_operand.columnwise if precision.quantized else None,
        )
        ctx.settings, ctx.keep_rounded = settings, keep_rounded
        ctx.has_norm_bias = norm_bias is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        returned = total if settings.returns_total else normalized
        return output, returned if settings.return_normalized else None

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor, grad_normalized: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input, norm weight and bias, weight and bias."""
        x, norm_weight, mean, inverse, saved, weight, weight_columnwise = ctx.saved_tensors
        settings: LinearSettings = ctx.settings
        layout, precision = settings.layout, settings.precision
        total_grad = _gathered(grad_output, layout.gathers_grad_output, settings)
        operand = precision.grad_output(total_grad)

        grad_input = grad_norm_weight = grad_norm_bias = grad_weight = grad_bias = None
        if any(ctx.needs_input_grad[:3]):
            (whole,) = gathered([weight], backward=True)
            columnwise = whole if weight_columnwise is None else weight_columnwise
            grad_input = input_gradient(operand, Operand(whole, columnwise), grad_output.dtype)
            if grad_normalized is not None and settings.returns_total:
                grad_input = grad_input + grad_normalized
            if layout.column:
                grad_input = layout.sum(grad_input)
        if ctx.needs_input_grad[3]:
            dtype = gradient_dtype([weight])

            def compute() -> torch.Tensor:
                grad = operand
                if ctx.keep_rounded:
                    return weight_gradient(grad, Operand(saved, saved), dtype)
                x_total = _gathered(saved, layout.gathers_input, settings)
                if precision.wgrad_in_high_precision:
                    total = Operand(x_total, x_total)
                    grad = Operand(total_grad, total_grad)
                else:
                    total = precision.input(x_total, again=True)
                return weight_gradient(grad, total, dtype)

            (grad_weight,) = scattered([weight], [now_or_later(settings.delayed, compute)])
        # From this rank's rows, as the gradients of the norm: with sequence parallelism Megatron
        # sums those of a row-parallel bias and of the norm's parameters, which are marked for it.
        if ctx.needs_input_grad[4]:
            grad_bias = bias_gradient(grad_output, ctx.bias_dtype)
        if settings.norm is not None and grad_input is not None:
            if grad_normalized is not None and not settings.returns_total:
                grad_input = grad_input + grad_normalized
            grad_input, grad_norm_weight, grad_norm_bias = norm_backward(
                grad_input, x, norm_weight, mean, inverse, settings.norm
            )
        precision.after_backward()
        return (
            grad_input,
            grad_norm_weight,
            grad_norm_bias if ctx.has_norm_bias else None,
            grad_weight,
            grad_bias,
            None,
        )


class ParallelLinear(TransformerEngineBaseModule):
    """What the linear layers share; ``parallel_mode`` is "column", "row" or none."""

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
        self.in_features = _divide(in_features, tp_size if parallel_mode == "row" else 1)
        self.out_features = _divide(out_features, tp_size if parallel_mode == "column" else 1)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        if rng_tracker_name is not None:
            self.rng_tracker_name = rng_tracker_name
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.save_original_input = save_original_input
        self._rounds_weights = not makes_fp8_weights()
        self._rounded: dict[int, Operand] = {}
        self.ub_overlap_ag = ub_overlap_ag or ub_overlap_rs_dgrad or ub_bulk_dgrad
        self.ub_name = ub_name
        dtype = params_dtype or torch.get_default_dtype()
        self.make_parameters(dtype, device, init_method or default_init)
        if delay_wgrad_compute:
            self.delay_gradients()

    def make_parameters(self, dtype: torch.dtype, device: Any, init: InitMethod) -> None:
        """Make the weight ``[n, k]`` and the bias ``[n]``, which is empty without one."""
        shape = (self.out_features, self.in_features)
        weight = self.add_parameter("weight", shape, dtype, device, init, tracked=True)
        # Marked in any case, as by TransformerEngine: Megatron before 0.19 gives experts no mode,
        # and counts a gradient norm by the mark.
        self.mark_partitioned(weight, 1 if self.parallel_mode == "row" else 0)
        if self.use_bias:
            zeros = torch.nn.init.zeros_
            self.mark_bias(self.add_parameter("bias", shape[:1], dtype, device, zeros))
        else:
            self.bias = torch.Tensor()

    def settings(
        self, inp: torch.Tensor, is_first: bool | None, num_gemms: int = 1, **of_norm: Any
    ) -> LinearSettings:
        """Fix layout and precision for one call.

        ``is_first``: whether its microbatch is the first with these weights, if the caller knows.

        Raises ``TypeError`` as TransformerEngine if a parameter has another dtype than the input.
        """
        for name, parameter in () if torch.is_autocast_enabled() else self.named_parameters():
            if parameter.dtype != inp.dtype:
                raise TypeError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f"Found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}"
                )
        precision = self.precision(num_gemms)
        if is_first:
            self._rounded = {}
        keeps = is_first is not None and precision.quantized and self._rounds_weights
        return LinearSettings(
            layout=self.layout(),
            precision=precision,
            rounded=self._rounded if keeps else None,
            save_original_input=self.save_original_input,
            buffer=self.ub_name if self.ub_overlap_ag else None,
            delayed=self.wgrad_queue,
            **of_norm,
        )


class Linear(ParallelLinear):
    """A linear layer."""

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False
    ) -> Any:
        """``[s, ..., k]`` to ``[s', ..., n]``, and the bias if ``return_bias``."""
        bias = self.bias if self.apply_bias else None
        settings = self.settings(inp, is_first_microbatch)
        output, _ = LinearFunction.apply(inp, None, None, self.weight, bias, settings)
        return (output, self.bias) if self.return_bias else output


class LayerNormLinear(ParallelLinear):
    """A norm and a linear layer."""

    layer_norm_bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        if options.get("parallel_mode") == "row":
            raise NotImplementedError("a norm cannot be cut along its features")
        self.normalization, self.eps = normalization, eps
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        super().__init__(in_features, out_features, **options)

    def make_parameters(self, dtype: torch.dtype, device: Any, init: InitMethod) -> None:
        """Make the norm's weight and bias ``[k]``, and the linear layer's."""
        zeros, ones = torch.nn.init.zeros_, torch.nn.init.ones_
        first_values = {"layer_norm_weight": zeros if self.zero_centered_gamma else ones}
        if self.normalization == "LayerNorm":
            first_values["layer_norm_bias"] = zeros
        else:
            self.layer_norm_bias = None
        for name, first_value in first_values.items():
            shape = (self.in_features,)
            parameter: Any = self.add_parameter(name, shape, dtype, device, first_value)
            # Each rank normalises its part of the sequence.
            parameter.sequence_parallel = self.sequence_parallel
        super().make_parameters(dtype, device, init)

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False
    ) -> Any:
        """``[s, ..., k]`` to ``[s', ..., n]``; then bias and norm output as asked for."""
        settings = self.settings(
            inp,
            is_first_microbatch,
            norm=NormKind(self.normalization, self.eps, self.zero_centered_gamma),
            return_normalized=self.return_layernorm_output,
            return_gathered=self.return_layernorm_output_gathered,
        )
        norm = self.layer_norm_weight, self.layer_norm_bias
        bias = self.bias if self.apply_bias else None
        output, normalized = LinearFunction.apply(inp, *norm, self.weight, bias, settings)
        results = [output]
        if self.return_bias:
            results.append(self.bias)
        if self.return_layernorm_output:
            results.append(normalized)
        return tuple(results) if len(results) > 1 else output
