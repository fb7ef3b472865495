# SPDX-License-Identifier: Apache-2.0
"""Context parallelism by a ring of point-to-point messages (``p2p``, ring attention).

Keys and values travel around the ring. A rank attends to the block it holds while the next one is
on its way, and joins the blocks' outputs by their log-sum-exps. In the backward pass the blocks
travel once more, and the gradients of each block travel with it and come home last.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.cpu.te.attention_core import (
    AttentionSettings,
    Part,
    attend,
    attend_backward,
    join,
    output_dot,
    upcast,
)
from megatron_ttrace.cpu.te.masks import Tokens
from megatron_ttrace.cpu.te.parallel import Group


class Ring:
    """The neighbours of this rank, to which it sends and from which it receives."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def holder(self, step: int) -> int:
        """Rank whose block is here after ``step`` steps."""
        return (self.rank - step) % self.size

    def start(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send ``tensor`` to the next rank; the result waits for the previous rank's."""
        tensor = tensor.contiguous()
        incoming = torch.empty_like(tensor)
        # One message at a time is under way in a group, so sends and receives pair up in order.
        works: list[Any] = [
            dist.isend(tensor, self._next, group=self.group),
            dist.irecv(incoming, self._previous, group=self.group),
        ]

        def arrived() -> torch.Tensor:
            for work in works:
                work.wait()
            return incoming

        return arrived


def _pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k, v], -1)


def _unpack(block: torch.Tensor, k_channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return block[..., :k_channels], block[..., k_channels:]


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries over the blocks of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        settings: AttentionSettings,
        group: Group,
        tokens: list[Tokens],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[b, h, s, d]``, ``[b, g, s, d]``, ``[b, g, s, dv]`` to ``[b, h, s, dv]``."""
        ring = Ring(group)
        block = _pack(k, v)
        parts: list[Part] = []
        out = lse = max_score = None
        for step in range(ring.size):
            arrived = ring.start(block) if step < ring.size - 1 else None
            allowed = settings.rule.allowed(tokens[ring.rank], tokens[ring.holder(step)])
            part = settings.part(allowed, q, k)
            block_out, block_lse, block_max = attend(*upcast(q, *_unpack(block, k.shape[-1])), part)
            if out is None or lse is None or max_score is None:
                out, lse, max_score = block_out, block_lse, block_max
            else:
                out, lse = join(out, lse, block_out, block_lse)
                max_score = torch.maximum(max_score, block_max)
            parts.append(part)
            if arrived is not None:
                block = arrived()
        assert out is not None
        assert max_score is not None
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.parts = group, parts
        ctx.mark_non_differentiable(max_score)
        return out.to(q.dtype), max_score

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k and v; those of k and v have been to all ranks."""
        q, k, v, out, lse = ctx.saved_tensors
        ring = Ring(ctx.group)
        grad_out = grad_out.to(out.dtype)
        delta = output_dot(grad_out, out)
        block = _pack(k, v)
        grad_q = torch.zeros_like(q, dtype=out.dtype)
        grad_block = torch.zeros_like(block, dtype=out.dtype)
        for step in range(ring.size):
            block_q, block_k, block_v, _score = attend_backward(
                grad_out, delta, lse, *upcast(q, *_unpack(block, k.shape[-1])), ctx.parts[step]
            )
            grad_q += block_q
            grad_block = grad_block + _pack(block_k, block_v)
            if step < ring.size - 1:
                block = ring.start(block)()
            # The gradients go on with their block; after the last step that is home.
            grad_block = ring.start(grad_block)()
        grad_k, grad_v = _unpack(grad_block, k.shape[-1])
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None
