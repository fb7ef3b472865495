# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm, alone and as the first half of ``LayerNormLinear``.

The kernels compute in float32 whatever the input's type and round once at the end; so does this
(float64 stays float64, for tests). As they do, it keeps its input for the backward pass, and no
copy: if that memory is used again too early, gradients are wrong. A zero-centred weight is stored
as its distance from one.

With sequence parallelism each rank normalises its own part of the sequence, so the gradients of the
weight and bias are partial sums. The parameters are marked ``sequence_parallel``, by which Megatron
knows to sum their gradients over the tensor-parallel ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_ttrace.cpu.autocast import dtype_or


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


def normalise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: NormKind
) -> torch.Tensor:
    """Normalise ``x`` ``[..., h]`` over its last dim."""
    normalised: torch.Tensor = _Normalise.apply(x, weight, bias, kind)
    return normalised


class _Normalise(torch.autograd.Function):
    """A backward pass that computes what it needs from the input."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        """Arguments as of :func:`normalise`."""
        *tensors, ctx.kind = inputs
        ctx.save_for_backward(*tensors)
        return _normalised(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients of those inputs that need them."""
        inputs: list[Any] = [None if x is None else x.detach() for x in ctx.saved_tensors]
        needed = zip(inputs, ctx.needs_input_grad, strict=False)
        wanted = [x.requires_grad_() for x, needs in needed if needs]
        x, weight, bias = inputs
        with torch.enable_grad():
            output = _normalised(x, weight, bias, ctx.kind)
        found = iter(torch.autograd.grad(output, wanted, gradients))
        return (*(next(found) if needs else None for needs in ctx.needs_input_grad),)


def _normalised(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: NormKind
) -> torch.Tensor:
    dtype = compute_dtype(x.dtype)
    centered = x.to(dtype)
    if kind.name == "LayerNorm":
        centered = centered - centered.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centered.square().mean(-1, keepdim=True) + kind.eps)
    gamma = weight.to(dtype)
    output = centered * inverse * (gamma + 1 if kind.zero_centered_gamma else gamma)
    if bias is not None:
        output = output + bias.to(dtype)
    return output.to(x.dtype)


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
        self._mark()
        if not self.weight.is_meta:
            self.reset_parameters()

    def _mark(self) -> None:
        for parameter in self.parameters():
            # Whether its gradient is a partial sum.
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

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
        # Whoever calls this may have replaced the parameters (base.py).
        self._mark()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., h]``, first rounded to the weight's dtype, or autocast's."""
        kind = NormKind(self.name, self.eps, self.zero_centered_gamma)
        shape = x.shape
        x = x.to(dtype_or(self.weight.dtype)).reshape(*shape[: x.dim() - self.weight.dim()], -1)
        bias = self.bias.reshape(-1) if self.has_bias else None
        return normalise(x, self.weight.reshape(-1), bias, kind).reshape(shape)


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
