# SPDX-License-Identifier: Apache-2.0
"""Attention as one autograd function ("fused" attention), and over a part of the keys.

Tensors are ``[b, h, s, d]``. Scores, probabilities and gradients are computed in float32 for 16-bit
inputs, as fused kernels do, and each result is rounded once.

A part's output is normalised over the part's own keys and comes with the logarithm of its
normaliser (log-sum-exp); two parts are joined exactly by weighing each with its share of the joint
normaliser. The backward pass needs the joint output and the joint log-sum-exp only, and gives each
part's gradients independently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.cpu.autocast import kernel
from megatron_ttrace.cpu.te.masks import MaskRule, Tokens
from megatron_ttrace.cpu.te.norms import compute_dtype
from megatron_ttrace.cpu.te.parallel import Group


@dataclass(frozen=True)
class Part:
    """What limits attention of these queries to these keys.

    ``allowed`` is boolean, ``bias`` is added to the scores; both broadcast to ``[b, h, sq, sk]``.
    ``keep`` is the dropout mask, already divided by the probability of keeping.
    """

    scale: float
    allowed: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    keep: torch.Tensor | None = None


def repeat_groups(kv: torch.Tensor, heads: int) -> torch.Tensor:
    """Give each query head its key or value head: ``[b, g, s, d]`` to ``[b, h, s, d]``."""
    groups = kv.shape[1]
    return kv if groups == heads else kv.repeat_interleave(heads // groups, dim=1)


def sum_groups(grad: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum gradients of heads that share a key head: ``[b, h, s, d]`` to ``[b, g, s, d]``."""
    b, heads, s, d = grad.shape
    if groups == heads:
        return grad
    return grad.view(b, groups, heads // groups, s, d).sum(2)


def scores(q: torch.Tensor, k: torch.Tensor, part: Part) -> torch.Tensor:
    """Scaled and masked scores ``[b, h, sq, sk]``; -inf where a key is not allowed."""
    result = torch.matmul(q, k.transpose(-1, -2)) * part.scale
    if part.bias is not None:
        result = result + part.bias.to(result.dtype)
    if part.allowed is not None:
        result = result.masked_fill(~part.allowed, float("-inf"))
    return result


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of ``q`` over this part's keys.

    Returns output ``[b, h, sq, dv]``, log-sum-exp ``[b, h, sq]`` and largest score ``[h]``. A query
    that may see no key of this part gives zero and -inf.
    """
    heads = q.shape[1]
    k, v = repeat_groups(k, heads), repeat_groups(v, heads)
    score = scores(q, k, part)
    lse = torch.logsumexp(score, -1)
    probability = _probability(score, lse)
    if part.keep is not None:
        probability = probability * part.keep
    return torch.matmul(probability, v), lse, score.amax((0, 2, 3))


def _probability(score: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    # A query without keys has lse = -inf; with zero in its place its row becomes exp(-inf) = 0.
    finite = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    return torch.exp(score - finite[..., None])


def join(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two parts' outputs ``[b, h, s, d]`` and log-sum-exps ``[b, h, s]``."""
    joint = torch.logaddexp(lse, other_lse)
    return out * _share(lse, joint) + other_out * _share(other_lse, joint), joint


def _share(lse: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    share = torch.exp(lse - joint)
    return torch.where(torch.isinf(joint), torch.zeros_like(share), share)[..., None]


def attend_backward(
    grad_out: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: Part,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients that this part's keys give: of q, k, v and of the scores.

    ``delta`` ``[b, h, sq]`` is what a change of the normaliser would cost; it and ``lse`` are those
    of the joint output over all parts. Shapes are those of q, k and v, and ``[b, h, sq, sk]``.
    """
    heads, groups = q.shape[1], k.shape[1]
    k_heads, v_heads = repeat_groups(k, heads), repeat_groups(v, heads)
    probability = _probability(scores(q, k_heads, part), lse)
    kept = probability if part.keep is None else probability * part.keep
    grad_v = torch.matmul(kept.transpose(-1, -2), grad_out)
    grad_probability = torch.matmul(grad_out, v_heads.transpose(-1, -2))
    if part.keep is not None:
        grad_probability = grad_probability * part.keep
    grad_score = probability * (grad_probability - delta[..., None])
    grad_q = torch.matmul(grad_score, k_heads) * part.scale
    grad_k = torch.matmul(grad_score.transpose(-1, -2), q) * part.scale
    return grad_q, sum_groups(grad_k, groups), sum_groups(grad_v, groups), grad_score


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


Block = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a rank, or their gradients."""


class Ring:
    """The neighbours of this rank, to which it sends and from which it receives (``p2p``).

    Keys and values travel around the ring. A rank attends to the block it holds while the next one
    is on its way. In the backward pass the blocks travel once more, and the gradients of each block
    travel with it and come home last. Without a group the rank is alone, and its block is always at
    home.
    """

    def __init__(self, group: Group = None) -> None:
        self.group, self.rank, self.size = group, 0, 1
        if group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self._next, self._previous = (
                dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, -1)
            )

    def allowed(self, rule: MaskRule, tokens: Sequence[Tokens]) -> list[torch.Tensor | None]:
        """The masks of this rank's queries, by step; ``tokens`` are those of each rank."""
        holders = ((self.rank - step) % self.size for step in range(self.size))
        return [rule.allowed(tokens[self.rank], tokens[holder]) for holder in holders]

    def start(self, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Block]:
        """Send a block to the next rank; the result waits for the previous rank's."""
        if self.size == 1:
            return lambda: (k, v)
        sent = torch.cat([k, v], -1)
        incoming = torch.empty_like(sent)
        # One message at a time is under way in a group, so sends and receives pair up in order.
        works: list[Any] = [
            dist.isend(sent, self._next, group=self.group),
            dist.irecv(incoming, self._previous, group=self.group),
        ]

        def arrived() -> Block:
            for work in works:
                work.wait()
            return incoming[..., : k.shape[-1]], incoming[..., k.shape[-1] :]

        return arrived


class FusedAttention(torch.autograd.Function):
    """Attention of ``q`` over all keys, with an optional score bias and sink per head.

    In a ring these are the blocks of its ranks, one in each step; a rank alone has one block.
    """

    @staticmethod
    @kernel
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sink: torch.Tensor | None,
        allowed: Sequence[torch.Tensor | None],
        settings: AttentionSettings,
        ring: Ring,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[b, h, sq, d]``, ``[b, g, sk, d]``, ``[b, g, sk, dv]`` to ``[b, h, sq, dv]``.

        ``allowed`` is by step. The second result is the largest score of each head, ``[h]``.
        """
        block, parts = (k, v), []
        joint: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        for step, mask in enumerate(allowed):
            arrived = ring.start(*block) if step < ring.size - 1 else None
            part = settings.part(mask, q, k, bias)
            out, lse, max_score = attend(*upcast(q, *block), part)
            if joint is not None:
                out, lse = join(joint[0], joint[1], out, lse)
                max_score = torch.maximum(joint[2], max_score)
            joint = out, lse, max_score
            parts.append(part)
            if arrived is not None:
                block = arrived()
        if sink is not None:
            # It takes part in the normaliser without contributing a value.
            out, lse = join(out, lse, torch.zeros(()), sink.to(lse.dtype)[None, :, None])
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.parts, ctx.ring = parts, ring
        ctx.mark_non_differentiable(max_score)
        return out.to(q.dtype), max_score

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k, v, bias and sink; those of k and v have been to all ranks."""
        q, k, v, sink, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad_out = grad_out.to(out.dtype)
        delta = (grad_out * out).sum(-1)
        block = k, v
        grads: tuple[torch.Tensor, ...] = ()
        for step, part in enumerate(ctx.parts):
            *of_block, grad_score = attend_backward(grad_out, delta, lse, *upcast(q, *block), part)
            grads = tuple(map(torch.add, grads, of_block)) if grads else tuple(of_block)
            if step < ring.size - 1:
                block = ring.start(*block)()
            # The gradients go on with their block; after the last step that is home.
            grads = grads[0], *ring.start(*grads[1:])()
        bias = ctx.parts[0].bias
        grad_bias = grad_sink = None
        if bias is not None and ctx.needs_input_grad[3]:
            grad_bias = grad_score.sum_to_size(bias.shape).to(bias.dtype)
        if sink is not None:
            # Its probability times minus what the others gain.
            probability = torch.exp(sink.to(lse.dtype)[None, :, None] - lse)
            grad_sink = -(probability * delta).sum((0, 2)).to(sink.dtype)
        grad_q, grad_k, grad_v = (
            grad.to(tensor.dtype) for grad, tensor in zip(grads, (q, k, v), strict=True)
        )
        return grad_q, grad_k, grad_v, grad_bias, grad_sink, None, None, None
