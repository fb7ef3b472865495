# SPDX-License-Identifier: Apache-2.0
"""Context parallelism by gathering all keys and values on every rank (``all_gather``)."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.cpu.te.attention_core import AttentionSettings, FusedAttention
from megatron_ttrace.cpu.te.masks import Tokens
from megatron_ttrace.cpu.te.norms import compute_dtype
from megatron_ttrace.cpu.te.parallel import (
    Group,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
)


class GatherSequence(torch.autograd.Function):
    """All ranks' ``[b, g, s, d]`` as ``[b, g, n * s, d]``; gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        """Gather, and give the result in the type that attention computes in."""
        ctx.group, ctx.dtype = group, tensor.dtype
        whole = gather_along_first_dim(tensor.permute(2, 0, 1, 3), group)
        return whole.permute(1, 2, 0, 3).to(compute_dtype(tensor.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Sum over the ranks' queries before rounding."""
        mine = reduce_scatter_along_first_dim(grad.permute(2, 0, 1, 3), ctx.group)
        return mine.permute(1, 2, 0, 3).to(ctx.dtype), None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: AttentionSettings,
    group: Group,
    tokens: list[Tokens],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the gathered keys; ``tokens`` of all ranks."""
    mine = tokens[dist.get_rank(group)]
    everyone = tokens[0].join(*tokens[1:])
    out, max_score = FusedAttention.apply(
        q,
        GatherSequence.apply(k, group),
        GatherSequence.apply(v, group),
        None,
        None,
        settings.rule.allowed(mine, everyone),
        settings,
    )
    return out, max_score
