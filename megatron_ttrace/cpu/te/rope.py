# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding in one function ("fused"): float32 inside, rounded once."""

from itertools import pairwise

import torch

from megatron_ttrace.cpu.te.context_parallel import zigzag
from megatron_ttrace.cpu.te.norms import compute_dtype


def _rotate_half(t: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Turn each pair ``(a, b)`` into ``(-b, a)``; pairs are neighbours, or half a dim apart."""
    if interleaved:
        return torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2)
    first, second = t.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotate(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first channels of ``t`` by the angles ``freqs``, which broadcast against it."""
    dtype = compute_dtype(t.dtype)
    channels = freqs.shape[-1]
    turned, unrotated = t[..., :channels].to(dtype), t[..., channels:]
    angles = freqs.to(dtype)
    turned = turned * angles.cos() + _rotate_half(turned, interleaved) * angles.sin()
    return torch.cat((turned.to(t.dtype), unrotated), -1)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate ``[s, b, h, d]``, ``[b, s, h, d]`` or packed ``[t, h, d]`` by ``freqs [s, 1, 1, d']``.

    Packed sequences each start at angle zero. Their starts ``cu_seqlens`` are those before the
    sequences were cut over context-parallel ranks; angles of the other formats are cut already.
    """
    if start_positions is not None:
        raise NotImplementedError("rotary embedding with start positions is for inference")
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("packed sequences need cu_seqlens")
        lengths = [end - start for start, end in pairwise(cu_seqlens.tolist())]
        positions = [
            zigzag(length, cp_size, cp_rank) if cp_size > 1 else torch.arange(length)
            for length in lengths
        ]
        return _rotate(t, freqs[torch.cat(positions), 0], interleaved)
    if tensor_format == "bshd":
        return _rotate(t, freqs[: t.shape[1]].transpose(0, 1), interleaved)
    return _rotate(t, freqs[: t.shape[0]], interleaved)
