# SPDX-License-Identifier: Apache-2.0
"""Attention with functions of scores and positions; PyTorch's own has no backward pass on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from megatron_ttrace.cpu.autocast import kernel


@kernel
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    **others: Any,
) -> torch.Tensor:
    """``softmax(score_mod(scale q k)) v`` of the positions that the mask has, in float32.

    ``query`` is [batch, heads, queries, channels], ``key`` and ``value`` are [batch, heads or
    groups, keys, channels]. ``score_mod``, of a score, its batch, head, query and key, and
    ``mask_mod`` of the ``block_mask``, without the score, get all at once, as tensors that
    broadcast; a row without any position is zero (torch/nn/attention/flex_attention.py). ``scale``
    is 1 / sqrt(channels) by default.

    Raises:
        NotImplementedError: for further results.
    """
    del kernel_options
    if return_lse or any(value is not None for value in others.values()):
        raise NotImplementedError("flex_attention on a CPU returns its output only")
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    positions = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *positions)
    if block_mask is not None:
        kept = block_mask.mask_mod(*positions)
        # Not -inf: gradients of a row without any position would be NaN.
        scores = scores.masked_fill(~kept, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, -1)
    if block_mask is not None:
        weights = weights.masked_fill(~kept, 0)
    return (weights @ value.float()).to(query.dtype)
