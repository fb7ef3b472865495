# SPDX-License-Identifier: Apache-2.0
"""The parts of NVIDIA's Apex without which Megatron leaves the code that it runs on GPUs.

Megatron's ``FusedLayerNorm`` is the only layer norm of the local layer specification that works
with sequence parallelism (it marks its parameters ``sequence_parallel``, so that their gradients
are summed over the tensor-parallel ranks). Its forward pass calls Apex's autograd functions; the
fallback without Apex, ``WrappedTorchNorm``, refuses sequence parallelism. Here these functions are
written in plain PyTorch and offered under Apex's module names, when the real Apex is absent.

Apex's kernels compute in float32 whatever the input's type and round once at the end; so does this.
For float32 and float64 inputs nothing is rounded in between.

Its optimizers are offered too (see ``optimizers.py`` for the reason). Its multi-tensor kernels
(``amp_C``) are *not*: without them Megatron takes its own ``local_multi_tensor_*`` functions, which
need no GPU.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from megatron_ttrace.cpu.optimizers import FusedAdam, FusedSGD
from megatron_ttrace.cpu.stand_in import offer


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inner_dims(tensor: torch.Tensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(tensor.dim() - len(normalized_shape), tensor.dim()))


def _outer_dims(tensor: torch.Tensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(tensor.dim() - len(normalized_shape)))


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Layer norm with weight and bias: ``(x - mean) / sqrt(var + eps) * weight + bias``."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        """Normalise over the last ``len(normalized_shape)`` dims."""
        dtype = _compute_dtype(input.dtype)
        dims = _inner_dims(input, normalized_shape)
        x = input.to(dtype)
        mean = x.mean(dims, keepdim=True)
        centered = x - mean
        inverse_std = torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
        output = centered * inverse_std * weight.to(dtype) + bias.to(dtype)
        ctx.normalized_shape = tuple(normalized_shape)
        # ``memory_efficient`` saves the output and inverts the norm in the backward pass, to
        # spare memory at the price of rounding. Memory is no matter here: the input is saved.
        ctx.save_for_backward(input, weight, bias, mean, inverse_std)
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the input, the weight and the bias."""
        input, weight, bias, mean, inverse_std = ctx.saved_tensors
        dtype = mean.dtype
        inner = _inner_dims(input, ctx.normalized_shape)
        outer = _outer_dims(input, ctx.normalized_shape)
        normalized = (input.to(dtype) - mean) * inverse_std
        grad = grad_output.to(dtype)
        scaled = grad * weight.to(dtype)
        grad_input = inverse_std * (
            scaled
            - scaled.mean(inner, keepdim=True)
            - normalized * (scaled * normalized).mean(inner, keepdim=True)
        )
        return (
            grad_input.to(input.dtype),
            (grad * normalized).sum(outer).to(weight.dtype),
            grad.sum(outer).to(bias.dtype),
            None,
            None,
            None,
        )


class FusedRMSNormAffineFunction(torch.autograd.Function):
    """RMS norm with weight: ``x / sqrt(mean(x²) + eps) * weight``."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        """Normalise over the last ``len(normalized_shape)`` dims."""
        dtype = _compute_dtype(input.dtype)
        x = input.to(dtype)
        dims = _inner_dims(input, normalized_shape)
        inverse_rms = torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
        ctx.normalized_shape = tuple(normalized_shape)
        ctx.save_for_backward(input, weight, inverse_rms)
        return (x * inverse_rms * weight.to(dtype)).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the input and the weight."""
        input, weight, inverse_rms = ctx.saved_tensors
        dtype = inverse_rms.dtype
        inner = _inner_dims(input, ctx.normalized_shape)
        outer = _outer_dims(input, ctx.normalized_shape)
        normalized = input.to(dtype) * inverse_rms
        grad = grad_output.to(dtype)
        scaled = grad * weight.to(dtype)
        grad_input = inverse_rms * (
            scaled - normalized * (scaled * normalized).mean(inner, keepdim=True)
        )
        return (
            grad_input.to(input.dtype),
            (grad * normalized).sum(outer).to(weight.dtype),
            None,
            None,
            None,
        )


class FastLayerNormFN(torch.autograd.Function):
    """Apex's persistent layer norm: the same function, normalising over the last dim."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        """Normalise over the last dim."""
        return FusedLayerNormAffineFunction.forward(ctx, input, weight, bias, weight.shape, eps)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the input, the weight and the bias."""
        return FusedLayerNormAffineFunction.backward(ctx, grad_output)[:5]


def real_apex_present() -> bool:
    """Say whether NVIDIA's Apex is there; the package index's ``apex`` is another project."""
    try:
        return importlib.util.find_spec("apex.normalization.fused_layer_norm") is not None
    except (ImportError, ValueError, AttributeError):
        return False


def install() -> None:
    """Offer norms and optimizers under Apex's module names, unless the real Apex is installed."""
    if real_apex_present():
        return
    offer("apex", {})
    offer("apex.normalization", {})
    norms = (FusedLayerNormAffineFunction, FusedRMSNormAffineFunction)
    offer("apex.normalization.fused_layer_norm", {norm.__name__: norm for norm in norms})
    offer("apex.optimizers", {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD})
    offer("apex.contrib", {})
    offer("apex.contrib.layer_norm", {})
    offer("apex.contrib.layer_norm.layer_norm", {"FastLayerNormFN": FastLayerNormFN})


def choose_local_norm(normalization: str) -> None:
    """Let Megatron's local layers use the norm class that can compute ``normalization``.

    Megatron chooses once, on import: ``FusedLayerNorm`` when Apex imports. That class refuses
    RMSNorm, which its other one, ``WrappedTorchNorm``, computes; so what a machine without Apex
    would have chosen is put in place for RMSNorm, and taken back for LayerNorm.
    """
    fused = importlib.import_module("megatron.core.fusions.fused_layer_norm").FusedLayerNorm
    wrapped = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    wanted, other = (fused, wrapped) if normalization == "LayerNorm" else (wrapped, fused)
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core."):
            continue
        for variable in ("LNImpl", "LayerNormImpl"):
            if vars(module).get(variable) is other:
                setattr(module, variable, wanted)
