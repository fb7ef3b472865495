# SPDX-License-Identifier: Apache-2.0
"""Boxes and the per-dim maps that they are the product of.

Legend: a *segment* says that ``length`` consecutive local indices of one dim are as many
consecutive logical indices. A :data:`DimMap` is the list of segments of one dim, in local order.
The product of one segment per dim is a :class:`Box`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Segment:
    """``local .. local+length`` of a rank's dim is ``logical .. logical+length`` of the whole."""

    local: int
    logical: int
    length: int


DimMap = tuple[Segment, ...]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Box:
    """One (local slice, logical slice) pair of equal extent.

    ``logical`` and ``extent`` have one entry per dim of the logical tensor. ``local`` has the same,
    or a single entry where the local tensor is a flat range (ZeRO): the offset of the box's first
    element, its elements following in row-major order.
    """

    logical: tuple[int, ...]
    extent: tuple[int, ...]
    local: tuple[int, ...]

    def __str__(self) -> str:
        """The logical slices as in Python: ``[0:8, 0:64]``."""
        pairs = zip(self.logical, self.extent, strict=True)
        return f"[{', '.join(f'{start}:{start + size}' for start, size in pairs)}]"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.extent)

    @property
    def is_flat(self) -> bool:
        """Whether the local side is an offset into a flat buffer."""
        return len(self.local) != len(self.extent)

    @property
    def region(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The logical side alone; replicas share it."""
        return self.logical, self.extent


def whole(size: int) -> DimMap:
    """A dim that is not divided."""
    return (Segment(0, 0, size),) if size else ()


def length(dim_map: DimMap) -> int:
    """Local size of a dim."""
    return sum(segment.length for segment in dim_map)


def take(dim_map: DimMap, start: int, stop: int) -> DimMap:
    """The map of the local range ``start .. stop``, renumbered from 0.

    This is how placement steps nest: an inner step divides what the outer one left.
    """
    taken = []
    for segment in dim_map:
        first = max(start, segment.local)
        last = min(stop, segment.local + segment.length)
        if first < last:
            taken.append(
                Segment(first - start, segment.logical + first - segment.local, last - first)
            )
    return tuple(taken)


def join(parts: Sequence[DimMap]) -> DimMap:
    """Lay maps one after the other in local order."""
    joined, offset = [], 0
    for part in parts:
        joined += [dataclasses.replace(segment, local=segment.local + offset) for segment in part]
        offset += length(part)
    return merge(tuple(joined))


def merge(dim_map: DimMap) -> DimMap:
    """Fuse neighbours that continue each other on both sides: fewer boxes, same meaning."""
    merged: list[Segment] = []
    for segment in dim_map:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.local + last.length == segment.local
            and last.logical + last.length == segment.logical
        ):
            merged[-1] = Segment(last.local, last.logical, last.length + segment.length)
        else:
            merged.append(segment)
    return tuple(merged)


def product(dim_maps: Sequence[DimMap]) -> tuple[Box, ...]:
    """All boxes of a local tensor. A 0-dim tensor is one box of one element."""
    return tuple(
        Box(
            logical=tuple(s.logical for s in segments),
            extent=tuple(s.length for s in segments),
            local=tuple(s.local for s in segments),
        )
        for segments in itertools.product(*dim_maps)
    )


def rows(
    start: int, stop: int, shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the row-major range ``start .. stop`` of ``shape`` into (offset, extent) blocks.

    Each block is contiguous in row-major order: full in every dim after the one it ranges over.
    At most ``2 * len(shape) - 1`` blocks, in row-major order.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    stride = math.prod(shape[1:])
    row, offset = divmod(start, stride)
    count = (stop - start) // stride
    if offset or not count:
        end = min(stop, (row + 1) * stride)
        for inner, extent in rows(offset, offset + end - start, shape[1:]):
            yield (row, *inner), (1, *extent)
    else:
        end = start + count * stride
        yield (row, *[0] * (len(shape) - 1)), (count, *shape[1:])
    yield from rows(end, stop, shape)
