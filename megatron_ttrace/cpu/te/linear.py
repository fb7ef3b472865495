# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``Linear`` and ``LayerNormLinear``, with their tensor-parallel communication.

``LayerNormLinear`` is a norm and the column-parallel layer after it; Megatron uses it for QKV and
for the first half of the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_ttrace.cpu.autocast import dtype_or
from megatron_ttrace.cpu.te.base import (
    InitMethod,
    Queue,
    TransformerEngineBaseModule,
    default_init,
    now_or_later,
)
from megatron_ttrace.cpu.te.distributed_weight import gathered, gradient_dtype, scattered
from megatron_ttrace.cpu.te.fp8 import makes_fp8_weights
from megatron_ttrace.cpu.te.norms import NormKind, normalise
from megatron_ttrace.cpu.te.parallel import TensorParallel, gather_into_buffer, gather_rows
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
    #: Return the input as it enters the product: gathered, with sequence parallelism.
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
        """Whether the input is returned gathered; its gradient is then summed over ranks.

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


def _require_fp8_sizes(*tensors: torch.Tensor) -> None:
    """Refuse what TransformerEngine does not compute in FP8, so that what runs here runs there."""
    for tensor in tensors:
        if flat(tensor).shape[0] % 8 or tensor.shape[-1] % 16:
            raise ValueError(
                "FP8 needs the last dim to be a multiple of 16 and the product of the others a "
                f"multiple of 8, and gets {list(tensor.shape)}"
            )


class LinearFunction(torch.autograd.Function):
    """``x @ weightᵀ + bias`` with its communication, or for several weights, each on its rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        settings: LinearSettings,
        splits: list[int] | None,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, ..., k]`` to ``[s', ..., n]``, and the gathered input if asked for.

        ``s`` and ``s'`` differ with sequence parallelism. ``splits`` are the rows of each weight;
        ``None``: there is one weight. Weights, then biases, are in ``parameters``.
        """
        count = 1 if splits is None else len(splits)
        weights, biases = parameters[:count], parameters[count:]
        precision, layout, whole = settings.precision, settings.layout, gathered(weights)
        if precision.quantized and splits is None:
            _require_fp8_sizes(x, *whole)
        if settings.save_original_input and precision.scales_are_delayed:
            raise ValueError("save_original_input is not supported with delayed scaling")
        # First gathered, then rounded: all ranks round the same tensor.
        total = x
        if layout.gathers_input and settings.buffer is not None:
            total = gather_into_buffer(x, layout.group, settings.buffer)
        elif layout.gathers_input:
            total = gather_rows(x, layout.group)
        outputs, inputs, rounded_weights = [], [], []
        for index, rows in enumerate(_parts(total, splits)):
            operand = precision.input(rows, index)
            weight = settings.weight(whole[index], index)
            output = forward_product(operand, weight, x.dtype)
            if layout.row:
                output = layout.sum(output)
            outputs.append(output + biases[index] if biases else output)
            inputs.append(operand.columnwise)
            if precision.quantized:
                rounded_weights.append(weight.columnwise)
        # A gathered input is not kept: each rank keeps its part and gathers again. What was
        # rounded is kept as it was rounded, unless asked for otherwise.
        keep_rounded = not (settings.save_original_input or precision.wgrad_in_high_precision)
        kept = inputs if keep_rounded else [x]
        ctx.save_for_backward(*kept, *weights, *rounded_weights)
        ctx.settings, ctx.keep_rounded = settings, keep_rounded
        ctx.splits, ctx.count, ctx.kept = splits, count, len(kept)
        return _joined(outputs), total if settings.returns_total else None

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor, grad_total: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the input, the weights and the biases."""
        settings: LinearSettings = ctx.settings
        layout, precision, end = settings.layout, settings.precision, ctx.kept + ctx.count
        saved = ctx.saved_tensors
        kept, weights, rounded_weights = saved[: ctx.kept], saved[ctx.kept : end], saved[end:]
        total = grad_output
        if layout.gathers_grad_output:
            total = gather_rows(total, layout.group)
        grads = _parts(total, ctx.splits)
        operands = [precision.grad_output(grad, index) for index, grad in enumerate(grads)]
        grad_input = None
        if ctx.needs_input_grad[0]:
            whole = gathered(weights, backward=True)
            columns = rounded_weights or whole
            grad_input = _joined(
                [
                    input_gradient(operand, Operand(weight, column), grad_output.dtype)
                    for operand, weight, column in zip(operands, whole, columns, strict=True)
                ]
            )
            if grad_total is not None:
                grad_input = grad_input + grad_total
            if layout.column:
                grad_input = layout.sum(grad_input)
        dtype = gradient_dtype(weights)

        def compute(index: int) -> torch.Tensor:
            if ctx.keep_rounded:
                return weight_gradient(operands[index], Operand(kept[index], kept[index]), dtype)
            x = gather_rows(kept[0], layout.group) if layout.gathers_input else kept[0]
            rows = _parts(x, ctx.splits)[index]
            if precision.wgrad_in_high_precision:
                grad = grads[index]
                return weight_gradient(Operand(grad, grad), Operand(rows, rows), dtype)
            return weight_gradient(operands[index], precision.input(rows, index, again=True), dtype)

        needed = ctx.needs_input_grad[3:]
        computed = [
            now_or_later(settings.delayed, partial(compute, index)) if needed[index] else None
            for index in range(ctx.count)
        ]
        # From this rank's rows, as the gradients of a norm: with sequence parallelism Megatron
        # sums those of a row-parallel bias and of a norm's parameters, which are marked for it.
        rows = _parts(grad_output, ctx.splits)
        grad_biases = [
            bias_gradient(rows[index], weights[0].dtype) if is_needed else None
            for index, is_needed in enumerate(needed[ctx.count :])
        ]
        precision.after_backward()
        return grad_input, None, None, *scattered(weights, computed), *grad_biases


def _parts(rows: torch.Tensor, splits: list[int] | None) -> tuple[torch.Tensor, ...]:
    """The rows of each weight."""
    return (rows,) if splits is None else rows.split(splits)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
        self.mark_parameters()
        if delay_wgrad_compute:
            self.delay_gradients()

    def make_parameters(self, dtype: torch.dtype, device: Any, init: InitMethod) -> None:
        """Make the weight ``[n, k]`` and the bias ``[n]``, which is empty without one."""
        shape = (self.out_features, self.in_features)
        self.add_parameter("weight", shape, dtype, device, init, tracked=True)
        if self.use_bias:
            self.add_parameter("bias", shape[:1], dtype, device, torch.nn.init.zeros_)
        else:
            self.bias = torch.Tensor()

    def mark_parameters(self) -> None:
        """Weights in any case, as by TransformerEngine.

        Megatron before 0.19 gives experts no mode, and counts a gradient norm by the mark.
        """
        weight: Any = self.weight
        bias: Any = self.bias
        self.mark_partitioned(weight, 1 if self.parallel_mode == "row" else 0)
        if self.use_bias and self.parallel_mode == "row":
            # Its gradient is one part of the sequence's.
            bias.sequence_parallel = self.sequence_parallel
        elif self.use_bias and self.parallel_mode == "column":
            self.mark_partitioned(bias, 0)

    def product_biases(self) -> list[Any]:
        """The biases of the products, in their order."""
        return [self.bias]

    def product(
        self,
        x: torch.Tensor,
        is_first: bool | None,
        *,
        splits: list[int] | None = None,
        return_gathered: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply :class:`LinearFunction` to the layer's parameters.

        ``is_first``: whether its microbatch is the first with these weights, if the caller knows.

        Raises ``TypeError`` as TransformerEngine if a parameter has another dtype than the input.
        """
        is_cast, x = torch.is_autocast_enabled(), x.to(dtype_or(x.dtype))
        for name, parameter in self.named_parameters():
            if parameter.dtype != x.dtype and not is_cast:
                raise TypeError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f"Found input dtype: {x.dtype} and {name!r} dtype: {parameter.dtype}"
                )
        weights = self.product_weights()
        precision = self.precision(len(weights))
        if is_first:
            self._rounded = {}
        keeps = is_first is not None and precision.quantized and self._rounds_weights
        settings = LinearSettings(
            layout=self.layout(),
            precision=precision,
            return_gathered=return_gathered,
            save_original_input=self.save_original_input,
            buffer=self.ub_name if self.ub_overlap_ag else None,
            delayed=self.wgrad_queue,
            rounded=self._rounded if keeps else None,
        )
        parameters = [*weights, *(self.product_biases() if self.apply_bias else ())]
        casts = (parameter.to(dtype_or(parameter.dtype)) for parameter in parameters)
        output, total = LinearFunction.apply(x, settings, splits, *casts)
        return output, total


class Linear(ParallelLinear):
    """A linear layer."""

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False
    ) -> Any:
        """``[s, ..., k]`` to ``[s', ..., n]``, and the bias if ``return_bias``."""
        output, _ = self.product(inp, is_first_microbatch)
        return (output, self.bias) if self.return_bias else output


class LayerNormLinear(ParallelLinear):
    """A norm and a linear layer."""

    layer_norm_weight: torch.Tensor
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
            self.add_parameter(name, (self.in_features,), dtype, device, first_value)
        super().make_parameters(dtype, device, init)

    def mark_parameters(self) -> None:
        """Also of the norm: each rank normalises its part of the sequence."""
        super().mark_parameters()
        norm: tuple[Any, ...] = self.layer_norm_weight, self.layer_norm_bias
        for parameter in norm:
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False
    ) -> Any:
        """``[s, ..., k]`` to ``[s', ..., n]``; then bias and norm output as asked for."""
        norm = NormKind(self.normalization, self.eps, self.zero_centered_gamma)
        inp = inp.to(dtype_or(inp.dtype))
        normalized = normalise(inp, self.layer_norm_weight, self.layer_norm_bias, norm)
        returned = self.return_layernorm_output
        gathers = returned and self.return_layernorm_output_gathered
        output, total = self.product(normalized, is_first_microbatch, return_gathered=gathers)
        results = [output]
        if self.return_bias:
            results.append(self.bias)
        if returned:
            # A tensor of its own, whose gradient is that of its users alone, as of one that is
            # gathered: the product's is not in it.
            results.append(normalized.view_as(normalized) if total is None else total)
        return tuple(results) if len(results) > 1 else output
