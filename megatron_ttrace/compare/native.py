# SPDX-License-Identifier: Apache-2.0
"""The sums of ``measure.py`` in one reading, by ``sums.c``.

setup.py compiles that where there is a C compiler. Elsewhere, and for other dtypes, PyTorch reads
each block several times.
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from megatron_ttrace.trace import compiled

BLOCK = 1 << 15
"""Elements of a block: in float64, two blocks take half a megabyte, and stay in a core's cache."""
_DEVICE_BLOCK = 1 << 22
"""The same on a GPU: bounds the memory that their copies in float64 take."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
"""Those of which ``sums.c`` has the arithmetic."""
_MOST = 16
"""Dimensions that ``sums.c`` has room for."""
_FIVE = ctypes.c_double * 5


type Five = tuple[float, float, float, float, float]
"""The fields of ``Sums`` from ``diff`` to ``worst``."""
type _Piece = tuple[torch.Tensor, torch.Tensor, Sequence[int]]
"""Two tensors, and their dimensions as ``sums.c`` wants them."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled file; ``None`` if there is none."""
    loaded = compiled.load("compare.sums")
    if loaded is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        loaded.ttrace_sums.argtypes = (
            *(pointer, pointer, number, ctypes.c_double, number),
            *(pointer, pointer),
        )
    return loaded


def sums(candidate: torch.Tensor, reference: torch.Tensor, by: float) -> tuple[Five, bool] | None:
    """The sums over two CPU tensors of one shape, and whether all bits are equal.

    ``None`` where PyTorch has to do it: nothing is compiled, the dtypes are others or differ, or
    not all elements are finite. The candidate's elements are multiplied by ``by``.
    """
    native = library()
    if native is None or candidate.dtype != reference.dtype or candidate.dtype not in DTYPES:
        return None
    totals, equal = _FIVE(), True
    if candidate.is_contiguous() and reference.is_contiguous():
        pairs: list[_Piece] = [(candidate, reference, (candidate.numel(), 1, 1))]
    else:
        pairs = _rows(candidate, reference)
    for c, r, layout in pairs:
        there = c.data_ptr(), r.data_ptr(), c.itemsize, by, len(layout) // 3
        same = native.ttrace_sums(*there, (ctypes.c_int64 * len(layout))(*layout), totals)
        equal = equal and bool(same)
    diff, norm, other, dot, worst = totals
    return ((diff, norm, other, dot, worst), equal) if math.isfinite(norm + other) else None


def _rows(a: torch.Tensor, b: torch.Tensor) -> list[_Piece]:
    """Both, in pieces with contiguous last dimensions; what has none is copied block by block."""
    layout = dims(a, b)
    size, *strides = layout[-1]
    if a.dim() > _MOST or (size > 1 and strides != [1, 1]):
        return [(x, y, (x.numel(), 1, 1)) for x, y in blocks(a, b)]
    return [(a, b, [*itertools.chain(*zip(*layout, strict=True))])]


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
