# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: the sequence is cut over ranks, attention sees all of it.

The sequence is cut into two chunks per rank and rank ``r`` of ``n`` holds chunks ``r`` and
``2n - 1 - r`` ("zig-zag"), so that a causal mask gives all ranks the same work. Packed sequences
are cut this way one by one.
"""

from itertools import pairwise

import torch

from megatron_ttrace.cpu.te import cp_all_to_all, cp_gather, cp_ring
from megatron_ttrace.cpu.te.attention_core import AttentionSettings
from megatron_ttrace.cpu.te.masks import Tokens
from megatron_ttrace.cpu.te.parallel import Group, group_size


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
    last = 2 * size - 1 - rank
    return torch.cat(
        [
            torch.arange(rank * chunk, (rank + 1) * chunk),
            torch.arange(last * chunk, (last + 1) * chunk),
        ]
    )


def partitioned_indices(cu_seqlens: torch.Tensor, total: int, size: int, rank: int) -> torch.Tensor:
    """Indices among ``total`` packed tokens of what ``rank`` holds."""
    bounds = cu_seqlens.tolist()
    parts = [start + zigzag(end - start, size, rank) for start, end in pairwise(bounds)]
    return torch.cat(parts).to(torch.int32)


def held_tokens(local_length: int, size: int, rank: int, cu_seqlens: torch.Tensor | None) -> Tokens:
    """Tokens that ``rank`` of ``size`` holds."""
    if cu_seqlens is None:
        return Tokens(zigzag(local_length * size, size, rank))
    everything = packed_tokens(cu_seqlens, local_length * size)
    mine = partitioned_indices(cu_seqlens, local_length * size, size, rank).long()
    assert everything.sequence is not None
    return Tokens(everything.position[mine], everything.sequence[mine])


def _refuse(
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    settings: AttentionSettings,
    comm: str,
    packed: bool,
) -> None:
    # TransformerEngine's own limits, so that what runs here also runs there.
    if bias is not None or settings.hidden is not None:
        raise NotImplementedError("context parallelism with an attention bias or mask tensor")
    if settings.rule.windowed and comm not in ("a2a", "all_gather"):
        raise ValueError(f"context parallelism by {comm} does not support sliding windows")
    if sink is not None and comm != "a2a":
        raise ValueError(f"context parallelism by {comm} does not support attention sinks")
    if packed and comm not in ("a2a", "p2p"):
        raise ValueError(f"context parallelism by {comm} does not support packed sequences")


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
    """
    _refuse(bias, sink, settings, comm, cu_seqlens is not None)
    levels = groups(group)
    if comm == "a2a+p2p":
        if len(levels) != 2:
            raise ValueError("a2a+p2p needs two process groups")
        levels = [level for level in levels if group_size(level) > 1]
        comm = comm if len(levels) == 2 else ("a2a" if levels == [groups(group)[0]] else "p2p")
    size = 1
    for level in levels:
        size *= group_size(level)
    tokens = [held_tokens(q.shape[2], size, rank, cu_seqlens) for rank in range(size)]
    if comm == "p2p":
        return cp_ring.attention(q, k, v, settings, levels[0], tokens)
    if comm == "all_gather":
        return cp_gather.attention(q, k, v, settings, levels[0], tokens)
    if comm == "a2a":
        return cp_all_to_all.attention(q, k, v, sink, settings, levels[0], tokens)
    if comm == "a2a+p2p":
        return _hierarchical(q, k, v, settings, levels, tokens)
    raise ValueError(f"unknown context-parallel communication {comm}")


def _hierarchical(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: AttentionSettings,
    levels: list[Group],
    tokens: list[Tokens],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads for sequence inside the first group, then a ring over the second."""
    inner, ring = levels
    width = group_size(inner)
    joined = [
        tokens[start].join(*tokens[start + 1 : start + width])
        for start in range(0, len(tokens), width)
    ]
    q, k, v = (cp_all_to_all.heads_for_sequence(t, inner) for t in (q, k, v))
    out, max_score = cp_ring.attention(q, k, v, settings, ring, joined)
    out = cp_all_to_all.sequence_for_heads(out, inner)
    return out, cp_all_to_all.gather_heads(max_score, inner)


__all__ = ["attention", "groups", "held_tokens", "needed", "partitioned_indices"]
