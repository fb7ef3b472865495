# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: the sequence is cut over ranks, attention sees all of it.

The sequence is cut into two chunks per rank and rank ``r`` of ``n`` holds chunks ``r`` and
``2n - 1 - r`` ("zig-zag"), so that a causal mask gives all ranks the same work. Packed sequences
are cut this way one by one.

Ranks communicate by a ring (``p2p``), by gathering all keys and values
(``all_gather``), or by trading their part of the sequence for all heads against the whole sequence
for some heads, and the output back (``a2a``, known as Ulysses); ``a2a+p2p`` does this inside one
group, and a ring over another.
"""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.cpu.te.attention_core import AttentionSettings, FusedAttention, Ring
from megatron_ttrace.cpu.te.masks import Tokens
from megatron_ttrace.cpu.te.norms import compute_dtype
from megatron_ttrace.cpu.te.parallel import (
    Group,
    gather_rows,
    group_size,
    reduce_scatter_rows,
)


def groups(group: Group) -> list[Group]:
    """All process groups of a hierarchy; the one group otherwise."""
    return list(group) if isinstance(group, list | tuple) else [group]


def needed(group: Group) -> bool:
    """Whether the sequence is cut at all."""
    return any(group_size(level) > 1 for level in groups(group))


def packed_tokens(cu_seqlens: torch.Tensor, length: int) -> Tokens:
    """Tokens of sequences that lie one after the other, starting at ``cu_seqlens``."""
    index = torch.arange(length)
    starts = cu_seqlens.to(torch.long)
    sequence = torch.searchsorted(starts, index, right=True) - 1
    return Tokens(index - starts[sequence], sequence)


def zigzag(length: int, size: int, rank: int) -> torch.Tensor:
    """Indices in a sequence of ``length`` of what ``rank`` of ``size`` holds."""
    chunk = length // (2 * size)
    starts = (rank * chunk, (2 * size - 1 - rank) * chunk)
    return torch.cat([torch.arange(start, start + chunk) for start in starts])


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Indices among packed tokens of those that a context-parallel rank holds."""
    bounds = cu_seqlens.tolist()
    parts = [start + zigzag(end - start, cp_size, cp_rank) for start, end in pairwise(bounds)]
    return torch.cat(parts).to(torch.int32)


def held_tokens(local_length: int, size: int, rank: int, cu_seqlens: torch.Tensor | None) -> Tokens:
    """Tokens that ``rank`` of ``size`` holds."""
    length = local_length * size
    if cu_seqlens is None:
        return Tokens(zigzag(length, size, rank))
    packed = packed_tokens(cu_seqlens, length)
    indices = thd_get_partitioned_indices(cu_seqlens, length, size, rank).long()
    assert packed.sequence is not None
    return Tokens(packed.position[indices], packed.sequence[indices])


class GatherSequence(torch.autograd.Function):
    """All ranks' ``[b, g, s, d]`` as ``[b, g, n * s, d]``; gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        """Gather, and give the result in the type that attention computes in."""
        ctx.group, ctx.dtype = group, tensor.dtype
        gathered = gather_rows(tensor.permute(2, 0, 1, 3), group)
        return gathered.permute(1, 2, 0, 3).to(compute_dtype(tensor.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Sum over the ranks' queries before rounding."""
        part = reduce_scatter_rows(grad.permute(2, 0, 1, 3), ctx.group)
        return part.permute(1, 2, 0, 3).to(ctx.dtype), None


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
        raise ValueError(f"a2a: {heads} heads per rank are not divisible by {size} ranks")
    pieces = tensor.reshape(b, size, heads // size, s, d).permute(1, 3, 0, 2, 4)
    return _exchange(pieces, group).flatten(0, 1).permute(1, 2, 0, 3)


def _gather_heads(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    b, heads, s, d = tensor.shape
    size = group_size(group)
    pieces = tensor.permute(2, 0, 1, 3).reshape(size, s // size, b, heads, d)
    return _exchange(pieces, group).permute(2, 0, 3, 1, 4).flatten(1, 2)


class Traded(torch.autograd.Function):
    """``[b, h, s, d]`` to ``[b, h / n, n * s, d]`` if ``scatters``, else the inverse."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, scatters: bool) -> torch.Tensor:
        """Trade; the ranks' parts of the sequence lie one after the other."""
        ctx.group, ctx.scatters = group, scatters
        return (_scatter_heads if scatters else _gather_heads)(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each direction is the other's gradient."""
        return (_gather_heads if ctx.scatters else _scatter_heads)(grad, ctx.group), None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    settings: AttentionSettings,
    group: Group,
    comm: str,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's ``q`` over all ranks' ``k`` and ``v``, all ``[b, h, s / cp, d]``.

    ``cu_seqlens`` are the starts of packed sequences, before they were cut.

    Raises:
        NotImplementedError, ValueError: at TransformerEngine's own limits, so that what runs here
            runs there.
    """
    if bias is not None or settings.hidden is not None:
        raise NotImplementedError("context parallelism with an attention bias or mask tensor")
    for feature, asked, ways in (
        ("sliding windows", settings.rule.windowed, ("a2a", "all_gather")),
        ("attention sinks", sink is not None, ("a2a",)),
        ("packed sequences", cu_seqlens is not None, ("a2a", "p2p")),
    ):
        if asked and comm not in ways:
            raise ValueError(f"context parallelism by {comm} does not support {feature}")
    comm, levels = _levels(comm, groups(group))
    size = math.prod(group_size(level) for level in levels)
    tokens = [held_tokens(q.shape[2], size, rank, cu_seqlens) for rank in range(size)]
    if comm not in ("p2p", "all_gather", "a2a", "a2a+p2p"):
        raise ValueError(f"unknown context-parallel communication {comm}")
    first, trades = levels[0], comm.startswith("a2a")
    if comm.endswith("p2p"):
        # Ranks that trade go round the ring with what they hold together.
        width = group_size(first) if trades else 1
        starts = range(0, size, width)
        held = [tokens[start].join(*tokens[start + 1 : start + width]) for start in starts]
        ring = Ring(levels[-1])
        allowed = ring.allowed(settings.rule, held)
    else:
        everyone = tokens[0].join(*tokens[1:])
        ring, own = Ring(), everyone if trades else tokens[dist.get_rank(first)]
        allowed = [settings.rule.allowed(own, everyone)]
    if trades:
        q, k, v = (Traded.apply(tensor, first, True) for tensor in (q, k, v))
        if sink is not None:
            sink = sink.chunk(group_size(first))[dist.get_rank(first)]
    elif comm == "all_gather":
        k, v = GatherSequence.apply(k, first), GatherSequence.apply(v, first)
    out, max_score = FusedAttention.apply(q, k, v, None, sink, allowed, settings, ring)
    if trades:
        out, max_score = Traded.apply(out, first, False), gather_rows(max_score, first)
    return out, max_score


def _levels(comm: str, levels: list[Group]) -> tuple[str, list[Group]]:
    """How ranks communicate, over which groups: of a hierarchy, one may have a single rank."""
    if comm != "a2a+p2p":
        return comm, levels
    if len(levels) != 2:
        raise ValueError("a2a+p2p needs two process groups")
    needed_levels = [level for level in levels if group_size(level) > 1]
    if len(needed_levels) == 1:
        comm = "a2a" if needed_levels == levels[:1] else "p2p"
    return comm, needed_levels
