# SPDX-License-Identifier: Apache-2.0
"""How two tensors of one shape lie in memory, and pieces of both that can be read in order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 1 << 15
"""Elements of a block: in float64, two blocks take half a megabyte, and stay in a core's cache."""
_DEVICE_BLOCK = 1 << 22
"""The same on a GPU: bounds the memory that their copies in float64 take."""


def blocks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors in contiguous blocks of few elements, in row-major order."""
    most = BLOCK if a.device.type == "cpu" else _DEVICE_BLOCK
    if a.numel() <= most:
        yield a.contiguous(), b.contiguous()
    elif a.is_contiguous() and b.is_contiguous():
        yield from zip(a.view(-1).split(most), b.view(-1).split(most), strict=True)
    else:
        count = max(1, most * len(a) // a.numel())
        for x, y in zip(a.split(count), b.split(count), strict=True):
            yield from blocks(*((x, y) if count > 1 else (x[0], y[0])))


def dims(a: torch.Tensor, b: torch.Tensor) -> list[tuple[int, int, int]]:
    """Size of each dimension, and both tensors' strides in elements.

    Dimensions that are one in both memories are merged; there is at least one.
    """
    merged: list[tuple[int, int, int]] = []
    for size, of_a, of_b in zip(a.shape, a.stride(), b.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * of_a, size * of_b):
            size *= merged.pop()[0]
        merged.append((size, of_a, of_b))
    return merged or [(1, 1, 1)]
