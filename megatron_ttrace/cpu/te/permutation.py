# SPDX-License-Identifier: Apache-2.0
"""The fused functions of an MoE token dispatcher: sort tokens by expert, and back.

The row map that goes from one function to the other is opaque to Megatron. Here it is
``[rows, 2]``: the token and the expert of each permuted row.
"""

from typing import Any

import torch

from megatron_ttrace.cpu.te.norms import compute_dtype


def _rows(routing_map: torch.Tensor, num_out_tokens: int | None) -> torch.Tensor:
    """Token and expert of each permuted row: by expert, then by token."""
    if routing_map.shape[0] > 0 and (num_out_tokens is None or num_out_tokens <= 0):
        raise AssertionError(f"moe_permute needs num_out_tokens > 0, not {num_out_tokens}")
    rows = routing_map.bool().t().nonzero().flip(-1)
    limit = num_out_tokens if num_out_tokens is not None and num_out_tokens >= 0 else None
    return rows[:limit]


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[tokens, h]`` to ``[rows, h]``; ``routing_map`` is boolean ``[tokens, experts]``."""
    if map_type != "mask":
        raise NotImplementedError("Megatron gives the routing as a mask")
    row_map = _rows(routing_map, num_out_tokens)
    return inp[row_map[:, 0]], row_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`moe_permute`, with the weight of each row, ``[rows]``, second."""
    row_map = _rows(routing_map, num_out_tokens)
    return inp[row_map[:, 0]], probs[row_map[:, 0], row_map[:, 1]], row_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum ``[rows, h]`` to ``[tokens, h]``, weighted if ``merging_probs`` ``[tokens, experts]``."""
    if pad_offsets is not None:
        raise NotImplementedError("rows padded by moe_permute_and_pad_with_probs, on a CPU")
    weights = merging_probs if merging_probs is not None else probs
    values = inp.to(compute_dtype(inp.dtype))
    if weights is not None:
        values = values * weights[row_id_map[:, 0], row_id_map[:, 1]].to(values.dtype)[:, None]
    shape = restore_shape if restore_shape is not None else inp.shape
    result = torch.zeros(tuple(shape), dtype=values.dtype)
    return result.index_add(0, row_id_map[:, 0], values).to(inp.dtype)


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """Put chunks of ``[rows, h]`` of the given sizes in the order ``sorted_index``."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`moe_sort_chunks_by_index`, for rows and their weights."""
    return (
        moe_sort_chunks_by_index(inp, split_sizes, sorted_index),
        moe_sort_chunks_by_index(probs, split_sizes, sorted_index),
    )


class Fp8Padding(torch.nn.Module):
    """Fill each expert's rows with zeros to a multiple of ``align_size``."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def _padded(self, m_splits: list[int]) -> list[int]:
        return [-(-size // self.align_size) * self.align_size for size in m_splits]

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> Any:
        """``[rows, h]`` to ``[more rows, h]``, and the new numbers of rows."""
        padded = self._padded(m_splits)
        parts = [
            torch.nn.functional.pad(rows, (0, 0, 0, wanted - rows.shape[0]))
            for rows, wanted in zip(inp.split(m_splits), padded, strict=True)
        ]
        return torch.cat(parts), padded


class Fp8Unpadding(Fp8Padding):
    """Take the zeros of :class:`Fp8Padding` away."""

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """``[more rows, h]`` to ``[rows, h]``; ``m_splits`` are the numbers without padding."""
        padded = inp.split(self._padded(m_splits))
        return torch.cat([rows[:size] for rows, size in zip(padded, m_splits, strict=True)])
