# SPDX-License-Identifier: Apache-2.0
"""The sums of ``measure.py`` in one reading, by ``sums.c``.

setup.py compiles that where there is a C compiler. Elsewhere PyTorch reads each block
several times.
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Iterator, Sequence, Set

import torch
import xxhash

from megatron_ttrace.trace import compiled
from megatron_ttrace.trace.checksum import checksum
from megatron_ttrace.trace.views import memory

BLOCK = 1 << 15
"""Elements of a block: in float64, two blocks take half a megabyte, and stay in a core's cache."""
_DEVICE_BLOCK = 1 << 22
"""The same on a GPU: bounds the memory that their copies in float64 take."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
"""Those of which ``sums.c`` has the arithmetic."""
_MOST = 16
"""Dimensions that ``sums.c`` has room for."""
_PIECE = 1 << 19
"""Bytes of a tensor that are summed before they are read again for the checksum."""
_SMALL = 1 << 22
"""Bytes of a tensor that is copied as a whole to be read in order."""
_FIVE = ctypes.c_double * 5

type Five = tuple[float, float, float, float, float]
"""The fields of ``Sums`` from ``diff`` to ``worst``."""
type _Piece = tuple[int, int, Sequence[int], int]
"""Addresses in both tensors, the dimensions as ``sums.c`` wants them, and the number of bytes of
the candidate up to the end of the piece."""


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


def sums(candidate: torch.Tensor, reference: torch.Tensor, by: float) -> tuple[Five, int] | None:
    """The sums over two CPU tensors of one shape, and the checksum of the candidate's bits.

    The candidate's elements are multiplied by ``by``. The checksum is 0 if that is 1 and all bits
    are equal. ``None`` where PyTorch has to do it: nothing is compiled, the elements are integers,
    or not all are finite.
    """
    native = library()
    dtypes = {candidate.dtype, reference.dtype}
    if native is None or not all(dtype.is_floating_point for dtype in dtypes):
        return None
    bits = memory(candidate) if candidate.is_contiguous() else None
    digest, hashed, equal = xxhash.xxh3_64(), 0, by == 1.0 and len(dtypes) == 1
    totals = _FIVE()
    summed = _summed(dtypes)
    for c, r, layout, end in _pieces(candidate, reference, summed):
        pair = c, r, summed.itemsize, by, len(layout) // 3
        same = native.ttrace_sums(*pair, (ctypes.c_int64 * len(layout))(*layout), totals)
        equal = equal and bool(same)
        if bits is not None and not equal:
            digest.update(bits[hashed:end])
            hashed = end
    diff, norm, other, dot, worst = totals
    if not math.isfinite(norm + other):
        return None
    five = diff, norm, other, dot, worst
    if equal:
        return five, 0
    return five, checksum_of(candidate) if bits is None else digest.intdigest()


def _summed(dtypes: Set[torch.dtype]) -> torch.dtype:
    """The dtype that elements of both tensors have without rounding, and ``sums.c`` can read."""
    if len(dtypes) == 1 and not dtypes.isdisjoint(DTYPES):
        return next(iter(dtypes))
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _pieces(
    candidate: torch.Tensor, reference: torch.Tensor, summed: torch.dtype
) -> Iterator[_Piece]:
    """Both tensors in pieces that a core's cache can hold until their checksum is computed.

    A candidate that is not contiguous is one piece; what has no contiguous rows, or another dtype
    than ``summed``, is copied block by block.
    """
    is_contiguous, item = candidate.is_contiguous(), candidate.itemsize
    as_they_are = candidate.dtype == reference.dtype == summed
    if is_contiguous and reference.is_contiguous():
        layout = [(candidate.numel(), 1, 1)]
        if as_they_are and candidate.nbytes <= _PIECE:
            yield candidate.data_ptr(), reference.data_ptr(), layout[0], candidate.nbytes
            return
    else:
        layout = dims(candidate, reference)
    size, *strides = layout[-1]
    if not as_they_are or candidate.dim() > _MOST or (size > 1 and strides != [1, 1]):
        end = 0
        for x, y in blocks(candidate, reference):
            end += x.nbytes
            x, y = x.to(summed), y.to(summed)
            yield x.data_ptr(), y.data_ptr(), (x.numel(), 1, 1), end
        return
    rows, *strides = layout[0]
    row = candidate.numel() // rows * item
    most = max(1, _PIECE // row) if is_contiguous else rows
    sizes, *others = zip(*layout, strict=True)
    more = (*sizes[1:], *itertools.chain(*others))
    c, r = candidate.data_ptr(), reference.data_ptr()
    for first in range(0, rows, most):
        count = min(most, rows - first)
        of_c, of_r = (first * stride * item for stride in strides)
        yield c + of_c, r + of_r, (count, *more), (first + count) * row


def checksum_of(data: torch.Tensor) -> int:
    """The checksum of a CPU tensor, without a copy of a whole large one."""
    if data.nbytes <= _SMALL or data.is_contiguous():
        return checksum(data)
    digest = xxhash.xxh3_64()
    for block, _ in blocks(data, data):
        digest.update(memory(block))
    return digest.intdigest()


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
