# SPDX-License-Identifier: Apache-2.0
"""Context parallelism by exchanging heads for sequence (``a2a``, known as Ulysses).

Each rank trades its part of the sequence for all heads against the whole sequence for some heads,
computes plain attention on those, and trades the output back.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.cpu.te.attention_core import AttentionSettings, FusedAttention
from megatron_ttrace.cpu.te.masks import Tokens
from megatron_ttrace.cpu.te.parallel import Group, gather_along_first_dim, group_size


def _exchange(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Send piece ``i`` of the first dim to rank ``i``; piece ``i`` of the result is from it."""
    tensor = tensor.contiguous()
    result = torch.empty_like(tensor)
    dist.all_to_all_single(result, tensor, group=group)
    return result


def _scatter_heads(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    b, heads, s, d = tensor.shape
    size = group_size(group)
    if heads % size:
        raise ValueError(f"a2a needs {heads} heads per rank to be a multiple of {size}")
    pieces = tensor.reshape(b, size, heads // size, s, d).permute(1, 3, 0, 2, 4)
    received = _exchange(pieces, group)
    return received.flatten(0, 1).permute(1, 2, 0, 3)


def _gather_heads(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    b, heads, s, d = tensor.shape
    size = group_size(group)
    pieces = tensor.permute(2, 0, 1, 3).reshape(size, s // size, b, heads, d)
    received = _exchange(pieces, group)
    return received.permute(2, 0, 3, 1, 4).flatten(1, 2)


class _Traded(torch.autograd.Function):
    """Heads for sequence if ``scatters``, else the inverse; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, scatters: bool) -> torch.Tensor:
        ctx.group, ctx.scatters = group, scatters
        return (_scatter_heads if scatters else _gather_heads)(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (_gather_heads if ctx.scatters else _scatter_heads)(grad, ctx.group), None, None


def heads_for_sequence(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """``[b, h, s, d]`` to ``[b, h / n, n * s, d]``, the ranks' parts one after the other."""
    result: torch.Tensor = _Traded.apply(tensor, group, True)
    return result


def sequence_for_heads(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """``[b, h / n, n * s, d]`` back to ``[b, h, s, d]``."""
    result: torch.Tensor = _Traded.apply(tensor, group, False)
    return result


def gather_heads(per_head: torch.Tensor, group: Group) -> torch.Tensor:
    """``[h / n]`` of each rank as ``[h]``."""
    return gather_along_first_dim(per_head, group)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    settings: AttentionSettings,
    group: Group,
    tokens: list[Tokens],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all queries over all keys, on this rank's heads; ``tokens`` of all ranks."""
    everyone = tokens[0].join(*tokens[1:])
    if sink is not None:
        sink = sink.chunk(group_size(group))[dist.get_rank(group)]
    out, max_score = FusedAttention.apply(
        heads_for_sequence(q, group),
        heads_for_sequence(k, group),
        heads_for_sequence(v, group),
        None,
        sink,
        settings.rule.allowed(everyone, everyone),
        settings,
    )
    return sequence_for_heads(out, group), gather_heads(max_score, group)
