# SPDX-License-Identifier: Apache-2.0
"""The sums of ``measure.py`` in one reading, by ``sums.c``.

setup.py compiles that where there is a C compiler. Elsewhere, and for other dtypes, NumPy reads
each block several times.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import math
from collections.abc import Iterator

import torch

from megatron_ttrace.compare.blocks import blocks, dims

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
"""Those of which ``sums.c`` has the arithmetic."""
_MOST = 16
"""Dimensions that ``sums.c`` has room for."""


class Accumulated(ctypes.Structure):
    """``sums`` in ``sums.c``: the fields of ``Sums`` from ``diff`` to ``worst``."""

    _fields_ = (
        ("diff", ctypes.c_double),
        ("reference", ctypes.c_double),
        ("candidate", ctypes.c_double),
        ("dot", ctypes.c_double),
        ("worst", ctypes.c_double),
    )
    diff: float
    reference: float
    candidate: float
    dot: float
    worst: float


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled file; ``None`` if there is none."""
    found = importlib.util.find_spec("megatron_ttrace.compare._sums")
    if found is None or found.origin is None:
        return None
    try:
        loaded = ctypes.CDLL(found.origin)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        loaded.ttrace_sums.argtypes = (
            *(pointer, pointer, number, ctypes.c_double, number),
            *(pointer, pointer),
        )
    except (OSError, AttributeError):  # built for another processor, or by another version
        return None
    return loaded


def sums(
    candidate: torch.Tensor, reference: torch.Tensor, by: float
) -> tuple[Accumulated, bool] | None:
    """The sums over two CPU tensors of one shape, and whether all bits are equal.

    ``None`` where NumPy has to do it: nothing is compiled, the dtypes are others or differ, or not
    all elements are finite. The candidate's elements are multiplied by ``by``.
    """
    compiled = library()
    if compiled is None or candidate.dtype != reference.dtype or candidate.dtype not in DTYPES:
        return None
    found, equal = Accumulated(), True
    for c, r in _rows(candidate, reference):
        sizes = list(zip(*dims(c, r), strict=True))
        layout = (ctypes.c_int64 * (3 * len(sizes[0])))(*itertools.chain(*sizes))
        there = c.data_ptr(), r.data_ptr(), c.itemsize, by, len(sizes[0])
        equal = bool(compiled.ttrace_sums(*there, layout, ctypes.byref(found))) and equal
    return (found, equal) if math.isfinite(found.reference + found.candidate) else None


def _rows(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both, in pieces with contiguous last dimensions; what has none is copied block by block."""
    size, *strides = dims(a, b)[-1]
    if a.dim() > _MOST or (size > 1 and strides != [1, 1]):
        yield from blocks(a, b)
    else:
        yield a, b
