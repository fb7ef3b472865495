# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm, alone and as the first half of ``LayerNormLinear``.

The kernels compute in float32 whatever the input's type and round once at the end; so does this
(float64 stays float64, for tests). A zero-centred weight is stored as its distance from one.

With sequence parallelism each rank normalises its own part of the sequence, so the gradients of the
weight and bias are partial sums. The parameters are marked ``sequence_parallel``, by which Megatron
knows to sum their gradients over the tensor-parallel ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type that kernels compute in for tensors of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class NormKind:
    """Which formula: ``LayerNorm`` or ``RMSNorm``, with what epsilon and which weight."""

    name: str
    eps: float
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        if self.name not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"Unsupported normalization ({self.name})")


def _gamma(weight: torch.Tensor, kind: NormKind, dtype: torch.dtype) -> torch.Tensor:
    gamma = weight.to(dtype)
    return gamma + 1 if kind.zero_centered_gamma else gamma


def norm_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: NormKind
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Normalise ``x`` ``[..., h]`` over its last dim.

    Returns the output ``[..., h]`` and what the backward pass needs: mean and inverse deviation,
    ``[..., 1]`` each; RMSNorm has no mean.
    """
    dtype = compute_dtype(x.dtype)
    centered = x.to(dtype)
    mean = None
    if kind.name == "LayerNorm":
        mean = centered.mean(-1, keepdim=True)
        centered = centered - mean
    inverse = torch.rsqrt(centered.square().mean(-1, keepdim=True) + kind.eps)
    output = centered * inverse * _gamma(weight, kind, dtype)
    if bias is not None:
        output = output + bias.to(dtype)
    return output.to(x.dtype), mean, inverse


def norm_backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    inverse: torch.Tensor,
    kind: NormKind,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the input ``[..., h]``, the weight ``[h]`` and the bias ``[h]``."""
    dtype = inverse.dtype
    centered = x.to(dtype) if mean is None else x.to(dtype) - mean
    normalized = centered * inverse
    grad = grad_output.to(dtype)
    scaled = grad * _gamma(weight, kind, dtype)
    inner = scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)
    if kind.name == "LayerNorm":
        inner = inner - scaled.mean(-1, keepdim=True)
    tokens = tuple(range(x.dim() - 1))
    grad_weight = (grad * normalized).sum(tokens)
    grad_bias = grad.sum(tokens)
    return (inverse * inner).to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


class NormFunction(torch.autograd.Function):
    """Autograd around :func:`norm_forward` and :func:`norm_backward`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kind: NormKind,
    ) -> torch.Tensor:
        """Normalise ``[..., h]``."""
        output, mean, inverse = norm_forward(x, weight, bias, kind)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.kind, ctx.has_bias = kind, bias is not None
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input, weight and bias."""
        x, weight, mean, inverse = ctx.saved_tensors
        grad_input, grad_weight, grad_bias = norm_backward(
            grad_output, x, weight, mean, inverse, ctx.kind
        )
        return grad_input, grad_weight, grad_bias if ctx.has_bias else None, None


class _Norm(torch.nn.Module):
    """What ``LayerNorm`` and ``RMSNorm`` share."""

    name = ""
    has_bias = False

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        shape: Any = normalized_shape if normalized_shape is not None else hidden_size
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = bool(sequence_parallel)
        dtype = dtype or params_dtype or torch.get_default_dtype()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        if self.has_bias:
            self.bias = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        for parameter in self.parameters():
            # Whether its gradient is a partial sum.
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Set the weight to one (stored as zero if zero-centred) and the bias to zero."""
        if defer_init:
            return
        with torch.no_grad():
            for name, parameter in list(self.named_parameters(recurse=False)):
                materialise(self, name, parameter)
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.has_bias:
                self.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., h]``, which is first rounded to the weight's dtype."""
        kind = NormKind(self.name, self.eps, self.zero_centered_gamma)
        shape = x.shape
        x = x.to(self.weight.dtype).reshape(*shape[: x.dim() - self.weight.dim()], -1)
        bias = self.bias.reshape(-1) if self.has_bias else None
        output: torch.Tensor = NormFunction.apply(x, self.weight.reshape(-1), bias, kind)
        return output.reshape(shape)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias``."""

    name = "LayerNorm"
    has_bias = True


class RMSNorm(_Norm):
    """``x / sqrt(mean(x²) + eps) * weight``."""

    name = "RMSNorm"


def materialise(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Give a parameter on the meta device memory; its attributes stay."""
    if parameter.is_meta:
        real = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"))
        real.__dict__.update(parameter.__dict__)
        module.register_parameter(name, real)
