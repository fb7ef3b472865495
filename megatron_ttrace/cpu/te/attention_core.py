# SPDX-License-Identifier: Apache-2.0
"""Attention as one autograd function, over all keys at once ("fused" attention).

Tensors are ``[b, h, s, d]``. Scores, probabilities and gradients are computed in float32 for 16-bit
inputs, as fused kernels do, and each result is rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ttrace.cpu.te.attention_math import (
    Part,
    add_sink,
    attend,
    attend_backward,
    output_dot,
    sink_gradient,
)
from megatron_ttrace.cpu.te.masks import MaskRule
from megatron_ttrace.cpu.te.norms import compute_dtype

#: Draws a dropout mask of a shape, already divided by the probability of keeping.
DrawMask = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class AttentionSettings:
    """What one call needs besides q, k and v."""

    scale: float
    rule: MaskRule
    #: Boolean, True where a key is hidden; broadcasts to ``[b, h, sq, sk]``.
    hidden: torch.Tensor | None = None
    #: None without dropout.
    draw_mask: DrawMask | None = None

    def part(
        self,
        allowed: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> Part:
        """Limits of attention of ``q`` to ``k``, with a newly drawn dropout mask."""
        if self.hidden is not None:
            visible = ~self.hidden
            allowed = visible if allowed is None else visible & allowed
        keep = None
        if self.draw_mask is not None:
            keep = self.draw_mask((*q.shape[:3], k.shape[2]), compute_dtype(q.dtype))
        return Part(self.scale, allowed, bias, keep)


def upcast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tensors in the type that attention computes in."""
    dtype = compute_dtype(q.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


class FusedAttention(torch.autograd.Function):
    """Attention of ``q`` over all keys, with an optional score bias and sink per head."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sink: torch.Tensor | None,
        allowed: torch.Tensor | None,
        settings: AttentionSettings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[b, h, sq, d]``, ``[b, g, sk, d]``, ``[b, g, sk, dv]`` to ``[b, h, sq, dv]``.

        The second result is the largest score of each head, ``[h]``.
        """
        part = settings.part(allowed, q, k, bias)
        out, lse, max_score = attend(*upcast(q, k, v), part)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.part = part
        ctx.mark_non_differentiable(max_score)
        return out.to(q.dtype), max_score

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k, v, bias and sink."""
        q, k, v, sink, out, lse = ctx.saved_tensors
        grad_out = grad_out.to(out.dtype)
        delta = output_dot(grad_out, out)
        grad_q, grad_k, grad_v, grad_score = attend_backward(
            grad_out, delta, lse, *upcast(q, k, v), ctx.part
        )
        grad_bias = grad_sink = None
        if ctx.part.bias is not None and ctx.needs_input_grad[3]:
            grad_bias = grad_score.sum_to_size(ctx.part.bias.shape).to(ctx.part.bias.dtype)
        if sink is not None:
            grad_sink = sink_gradient(delta, lse, sink).to(sink.dtype)
        return (
            grad_q.to(q.dtype),
            grad_k.to(k.dtype),
            grad_v.to(v.dtype),
            grad_bias,
            grad_sink,
            None,
            None,
        )
