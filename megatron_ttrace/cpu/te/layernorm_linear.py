# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``LayerNormLinear``: a norm and the column-parallel linear layer after it."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_ttrace.cpu.te import delayed_wgrad
from megatron_ttrace.cpu.te.base import InitMethod, TransformerEngineBaseModule, default_init
from megatron_ttrace.cpu.te.linear import (
    LinearSettings,
    gather_input,
    grad_output_operand,
    linear_weight_gradient,
    reduce_grad_input,
    reduce_output,
    require_fp8_sizes,
)
from megatron_ttrace.cpu.te.norms import NormKind, norm_backward, norm_forward
from megatron_ttrace.cpu.te.products import (
    Operand,
    bias_gradient,
    forward_product,
    input_gradient,
)


class LayerNormLinearFunction(torch.autograd.Function):
    """``norm(x) @ weightᵀ + bias`` with its communication."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kind: NormKind,
        settings: LinearSettings,
        return_normalized: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[s, ..., k]`` to ``[s', ..., n]`` and, if asked for, the norm's ``[s, ..., k]``."""
        require_fp8_sizes(x, weight, settings)
        precision = settings.precision
        normalized, mean, inverse = norm_forward(x, norm_weight, norm_bias, kind)
        # First gathered, then rounded: all ranks round the same tensor.
        total = gather_input(normalized, settings)
        operand = precision.input(total)
        weight_operand = precision.weight(weight)
        output = forward_product(operand, weight_operand, x.dtype)
        output = reduce_output(output, settings.layout)
        if bias is not None:
            output = output + bias

        keep_rounded = not precision.wgrad_in_high_precision
        ctx.save_for_backward(
            x,
            norm_weight,
            mean,
            inverse,
            operand.columnwise if keep_rounded else normalized,
            weight,
            weight_operand.columnwise if precision.quantized else None,
        )
        ctx.kind, ctx.settings, ctx.keep_rounded = kind, settings, keep_rounded
        ctx.has_norm_bias = norm_bias is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output, normalized if return_normalized else None

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor, grad_normalized: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input, norm weight and bias, weight and bias."""
        x, norm_weight, mean, inverse, saved, weight, weight_columnwise = ctx.saved_tensors
        settings: LinearSettings = ctx.settings
        operand = grad_output_operand(grad_output, settings)

        columnwise = weight if weight_columnwise is None else weight_columnwise
        partial = input_gradient(operand, Operand(weight, columnwise), grad_output.dtype)
        grad_norm_output = reduce_grad_input(partial, settings.layout)
        if grad_normalized is not None:
            grad_norm_output = grad_norm_output + grad_normalized

        grad_weight = grad_bias = None
        if ctx.needs_input_grad[3]:

            def compute() -> torch.Tensor:
                return linear_weight_gradient(
                    saved, ctx.keep_rounded, operand, grad_output, settings, weight.dtype
                )

            grad_weight = delayed_wgrad.now_or_later(settings.delayed, compute)
        if ctx.needs_input_grad[4]:
            grad_bias = bias_gradient(grad_output, ctx.bias_dtype)

        # With sequence parallelism the norm's own gradients come from this rank's rows; Megatron
        # sums them over the ranks, as their parameters are marked for it.
        grad_input, grad_norm_weight, grad_norm_bias = norm_backward(
            grad_norm_output, x, norm_weight, mean, inverse, ctx.kind
        )
        settings.precision.after_backward()
        return (
            grad_input,
            grad_norm_weight,
            grad_norm_bias if ctx.has_norm_bias else None,
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


class LayerNormLinear(TransformerEngineBaseModule):
    """A norm and a linear layer; Megatron uses it for QKV and for the first half of the MLP."""

    weight: torch.nn.Parameter
    bias: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = "cpu",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        tracker_name = getattr(self, "rng_tracker_name", None)
        super().__init__()
        if parallel_mode == "row":
            raise NotImplementedError("a norm cannot be cut along its features")
        if return_layernorm_output_gathered:
            raise NotImplementedError("the gathered norm output is not returned on a CPU")
        dtype = params_dtype or torch.get_default_dtype()
        self.in_features = in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = tracker_name
        self.normalization = normalization
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.ub_overlap_ag = ub_overlap_ag or ub_bulk_dgrad
        self.ub_name = ub_name
        self._add_norm(dtype, device)
        self._add_linear(dtype, device, init_method or default_init)
        if delay_wgrad_compute:
            self.delay_gradients("weight")

    def _add_norm(self, dtype: torch.dtype, device: Any) -> None:
        one = torch.nn.init.zeros_ if self.zero_centered_gamma else torch.nn.init.ones_
        shape = (self.in_features,)
        parameters: list[Any] = [self.add_parameter("layer_norm_weight", shape, dtype, device, one)]
        if self.normalization == "LayerNorm":
            zero = torch.nn.init.zeros_
            parameters.append(self.add_parameter("layer_norm_bias", shape, dtype, device, zero))
        else:
            self.layer_norm_bias = None
        for parameter in parameters:
            # Each rank normalises its part of the sequence.
            parameter.sequence_parallel = self.sequence_parallel

    def _add_linear(self, dtype: torch.dtype, device: Any, init: InitMethod) -> None:
        shape = (self.out_features, self.in_features)
        self.add_parameter("weight", shape, dtype, device, init, tracked=True)
        self.mark_partitioned(self.weight, 0)
        if self.use_bias:
            self.add_parameter("bias", (self.out_features,), dtype, device, torch.nn.init.zeros_)
            self.mark_bias(self.bias)
        else:
            self.bias = torch.Tensor()

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False
    ) -> Any:
        """``[s, ..., k]`` to ``[s', ..., n]``; then bias and norm output as asked for."""
        settings = LinearSettings(
            layout=self.layout(),
            precision=self.precision(),
            buffer=self.ub_name if self.ub_overlap_ag else None,
            delayed=self.wgrad_queue,
        )
        kind = NormKind(self.normalization, self.eps, self.zero_centered_gamma)
        output, normalized = LayerNormLinearFunction.apply(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.weight,
            self.bias if self.apply_bias else None,
            kind,
            settings,
            self.return_layernorm_output,
        )
        results = [output]
        if self.return_bias:
            results.append(self.bias)
        if self.return_layernorm_output:
            results.append(normalized)
        return tuple(results) if len(results) > 1 else output
