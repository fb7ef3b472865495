# SPDX-License-Identifier: Apache-2.0
"""The few sums a rank contributes about one of its tensors.

Tensors are read once; all arithmetic is in float64. Bits are compared first: of a block that is
bitwise equal to its reference, only the norm is computed. ``sums.c`` does that. Without it NumPy
does, in blocks whose float64 copies stay in a core's second-level cache.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import xxhash

from megatron_ttrace.compare import native
from megatron_ttrace.compare.blocks import BLOCK, blocks
from megatron_ttrace.compare.checksum import checksum, joined
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import Bounds, Count, Word
from megatron_ttrace.trace.memory import memory

Total = Annotated[float, Bounds(0.0, nan=True)]
"""A sum of squares, or a largest difference."""

_Array = np.ndarray[tuple[int], np.dtype[np.float64]]

_SERIAL = 1 << 13
"""Elements of a dot product for which OpenBLAS starts no threads: they cost more than it, and wait
for each other where training has the cores."""
_COMPARABLE = 1e-4
"""The least ratio of two squared norms at which the dot product follows from the difference."""

_SMALL = 1 << 22
"""Bytes of a tensor that is copied as a whole to be read in order."""

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """Sums over the elements of one rank's boxes; c candidate (divided by its factor), r reference.

    Attributes:
        n: number of elements.
        diff: sum of (c - r)^2.
        reference: sum of r^2.
        candidate: sum of c^2.
        dot: sum of c * r.
        worst: largest |c - r|.
        nonfinite: elements that are NaN or infinite on one side and not just so on the other.
        checksum: of the candidate's bits; on a CPU 0 where these are the reference's. Replicas
            that agree bit for bit have equal checksums, and only they.
        undefined: elements that are NaN on both sides: no difference, and no evidence either.
    """

    n: Count = 0
    diff: Total = 0.0
    reference: Total = 0.0
    candidate: Total = 0.0
    dot: float = 0.0
    worst: Total = 0.0
    nonfinite: Count = 0
    checksum: Word = 0
    undefined: Count = 0

    @classmethod
    def of(cls, values: Any) -> Sums:
        """The inverse of ``dataclasses.astuple``, also as JSON. Raises ``CodecError``."""
        return codec.decode_list(cls, values)

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            n=self.n + other.n,
            diff=self.diff + other.diff,
            reference=self.reference + other.reference,
            candidate=self.candidate + other.candidate,
            dot=self.dot + other.dot,
            worst=max(self.worst, other.worst),
            nonfinite=self.nonfinite + other.nonfinite,
            checksum=joined(self.checksum, other.checksum),
            undefined=self.undefined + other.undefined,
        )


def box_views(
    local: torch.Tensor, logical: torch.Tensor, boxes: Sequence[Box]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each box its (local, logical) pair of equally shaped views."""
    for box in boxes:
        yield local_view(local, box), logical_view(logical, box)


def local_view(local: torch.Tensor, box: Box) -> torch.Tensor:
    """The local side of ``box`` as a view (of the logical box's shape)."""
    if box.is_flat:
        return local.reshape(-1).narrow(0, box.local[0], box.numel).view(box.extent)
    return _narrowed(local, box.local, box.extent)


def logical_view(logical: torch.Tensor, box: Box) -> torch.Tensor:
    """The logical side of ``box`` as a view."""
    return _narrowed(logical, box.logical, box.extent)


def _narrowed(data: torch.Tensor, starts: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
    whole = tuple(data.shape)
    if whole != extent:
        for dim, (start, size) in enumerate(zip(starts, extent, strict=True)):
            if size != whole[dim]:
                data = data.narrow(dim, start, size)
    return data


def measure(
    local: torch.Tensor,
    logical: torch.Tensor,
    boxes: Sequence[Box],
    factor: float = 1.0,
) -> Sums:
    """Sums over all boxes of a local tensor against the logical one.

    Args:
        local: this rank's tensor, any strides, on a CPU (of others: compare/device.py).
        logical: the reference's whole tensor, likewise.
        boxes: how they correspond.
        factor: expected candidate/reference ratio.
    """
    local = local.detach() if local.requires_grad else local
    pairs = box_views(local, logical, boxes)
    found = [_measure_box(here, there, factor) for here, there in pairs]
    return found[0] if len(found) == 1 else sum(found, Sums())


def relative_error(sums: Sums, rms: float) -> float:
    """The relative error of one rank's part of a tensor: what is held against its tolerance.

    ``rms(c - r over the part) / max(rms(r over the part), rms(r over the whole tensor))``. For a
    part that is the whole tensor this is ``||c - r|| / ||r||``. For a smaller part, dividing by the
    part's own size finds a wrong shard however many ranks there are, and a part that happens to be
    nearly zero is not judged against itself. Sums that are no numbers are an infinite error.
    """
    if sums.n == 0 or sums.diff == 0.0:
        return 0.0
    scale = scale_of(sums, rms)
    error = math.sqrt(sums.diff / sums.n) / scale if scale else math.inf
    return math.inf if math.isnan(error) else error


def scale_of(sums: Sums, rms: float) -> float:
    """What the root mean square of a part's difference is divided by; ``sums.n`` is not zero."""
    return max(math.sqrt(sums.reference / sums.n), rms)


def _measure_box(here: torch.Tensor, there: torch.Tensor, factor: float) -> Sums:
    if not here.numel():
        return Sums()
    if not here.is_floating_point():
        return _measure_discrete(here, there)
    by = 1.0 / factor
    compiled = native.sums(here, there, by)
    if compiled is not None:
        numbers, equal = compiled
        return Sums(here.numel(), *numbers, checksum=_digest(here, equal and factor == 1.0))
    sums, equal = _in_blocks(here, there, by)
    return dataclasses.replace(sums, checksum=_digest(here, equal and factor == 1.0))


def _digest(data: torch.Tensor, as_reference: bool) -> int:
    """The checksum, without a copy of a whole large tensor; 0 if the bits are the reference's."""
    if as_reference:
        return 0
    if data.nbytes <= _SMALL or data.is_contiguous():
        return checksum(data)
    found = xxhash.xxh3_64()
    for block, _ in blocks(data, data):
        found.update(memory(block))
    return found.intdigest()


def _in_blocks(here: torch.Tensor, there: torch.Tensor, by: float) -> tuple[Sums, bool]:
    """The sums by NumPy, without the checksum, and whether all bits are equal."""
    total, equal = Sums(here.numel()), True
    with np.errstate(all="ignore"):
        for c_block, r_block in blocks(here, there):
            same = _same_bits(c_block, r_block)
            equal = equal and same
            c = r = _widened(r_block, _scratch.reference)
            if not same or by != 1.0:
                c = _widened(c_block, _scratch.candidate)
                if by != 1.0:
                    c *= by
            total = total + _block_sums(c, r)
    return total, equal


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one shape are bitwise equal."""
    return a.dtype == b.dtype and not _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes)


class _Scratch(threading.local):
    """Memory for a block of either side, of each thread: autograd runs hooks on its own."""

    def __init__(self) -> None:
        self.candidate, self.reference = torch.empty(2, BLOCK, dtype=torch.float64)


_scratch = _Scratch()


def _widened(block: torch.Tensor, scratch: torch.Tensor) -> _Array:
    """A block's elements as float64, in ``scratch``."""
    out = scratch if block.numel() == BLOCK else scratch[: block.numel()]
    if block.dtype.itemsize == 1:  # FP8, which torch converts one by one; "raise" would copy, too
        numbers = np.frombuffer(memory(block), np.uint8)
        return np.take(_values(block.dtype), numbers, out=out.numpy(), mode="wrap")
    if block.dtype is torch.float16:
        block = block.float()  # to float64 only this way with vector instructions
    out.view(block.shape).copy_(block)
    return out.numpy()


@functools.cache
def _values(dtype: torch.dtype) -> _Array:
    """The numbers that the 256 bytes stand for."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()


def _block_sums(c: _Array, r: _Array) -> Sums:
    """All but the number and the checksum; ``c`` is overwritten, unless it is ``r``."""
    reference = candidate = _dot(r, r)
    if c is not r:
        candidate = _dot(c, c)
    nonfinite = undefined = 0
    if not math.isfinite(reference + candidate):
        c, r, nonfinite, undefined = _finite_only(c, r)
        reference, candidate = _dot(r, r), _dot(c, c)
    found = Sums(0, 0.0, reference, candidate, reference, 0.0, nonfinite, 0, undefined)
    if c is r or not c.size:
        return found
    comparable = min(reference, candidate) > _COMPARABLE * max(reference, candidate)
    dot = 0.0 if comparable else _dot(c, r)
    np.subtract(c, r, out=c)
    diff = _dot(c, c)
    if comparable:
        dot = (reference + candidate - diff) / 2
    return dataclasses.replace(found, diff=diff, dot=dot, worst=float(max(c.max(), -c.min())))


def _dot(a: _Array, b: _Array) -> float:
    pieces = range(0, len(a), _SERIAL)
    return float(sum(a[at : at + _SERIAL].dot(b[at : at + _SERIAL]) for at in pieces))


def _finite_only(c: _Array, r: _Array) -> tuple[_Array, _Array, int, int]:
    """The elements that are finite on both sides; how many disagree elsewhere; how many NaN agree.

    Equal infinities and NaNs at the same places are agreement, not a difference.
    """
    finite = np.isfinite(c) & np.isfinite(r)
    undefined = np.isnan(c) & np.isnan(r)
    agree = finite | (c == r) | undefined
    return c[finite], r[finite], int((~agree).sum()), int(undefined.sum())


def _measure_discrete(here: torch.Tensor, there: torch.Tensor) -> Sums:
    """Integers and booleans are equal or not: every mismatch counts as an error of one."""
    mismatches = int((here != there).sum())
    n = here.numel()
    return Sums(
        n=n,
        diff=float(mismatches),
        reference=float(n),
        candidate=float(n),
        dot=float(n - mismatches),
        worst=float(mismatches > 0),
        checksum=checksum(here) if mismatches or here.dtype != there.dtype else 0,
    )
