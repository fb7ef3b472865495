# SPDX-License-Identifier: Apache-2.0
"""The sums of ``measure.py`` in one reading, by ``sums.c``.

setup.py compiles that where there is a C compiler. Elsewhere, and for other dtypes, PyTorch reads
each block several times.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Sequence

import torch

from megatron_ttrace.compare.blocks import blocks, dims
from megatron_ttrace.trace import compiled

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
