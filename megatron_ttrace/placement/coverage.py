# SPDX-License-Identifier: Apache-2.0
"""Is every element of a logical tensor held, and by equally many ranks? Arithmetic on boxes.

The logical tensor is cut along every box border; within such a cell all elements are held by the
same ranks. Holders are counted per cell with an n-dimensional difference array, so the cost is
boxes + cells, not elements: layouts of 16,384 ranks are checked without any data.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_ttrace.placement.boxes import Box


@dataclasses.dataclass(frozen=True, slots=True)
class Coverage:
    """Fewest and most holders of any element. ``least`` 0 means that something is uncovered."""

    least: int
    most: int

    @property
    def complete(self) -> bool:
        """Every element is held by someone."""
        return self.least > 0

    @property
    def even(self) -> bool:
        """Every element has as many replicas as every other."""
        return self.least == self.most


def coverage(
    logical_shape: Sequence[int], boxes: Iterable[Box], within: Iterable[Box] | None = None
) -> Coverage:
    """Count the holders of every element of a tensor of ``logical_shape``.

    ``within``: only of the elements of these boxes. Raises ``ValueError`` when a box leaves the
    tensor.
    """
    boxes = [box for box in boxes if box.numel]
    inside = None if within is None else [box for box in within if box.numel]
    if 0 in logical_shape or inside == []:
        return Coverage(1, 1)
    if not boxes:
        return Coverage(0, 0)
    if not logical_shape:
        return Coverage(len(boxes), len(boxes))
    cutting = [*boxes, *(inside or ())]
    starts = np.array([box.logical for box in cutting])
    stops = starts + [box.extent for box in cutting]
    outside = ((starts < 0) | (stops > logical_shape)).any(axis=1)
    if outside.any():
        box = cutting[int(outside.argmax())]
        raise ValueError(f"{box!r} exceeds a tensor of shape {tuple(logical_shape)}")
    borders = [
        np.unique(np.concatenate(([0, size], starts[:, d], stops[:, d])))
        for d, size in enumerate(logical_shape)
    ]
    counts = _counted(borders, starts[: len(boxes)], stops[: len(boxes)])
    if inside is not None:
        counts = counts[_counted(borders, starts[len(boxes) :], stops[len(boxes) :]) > 0]
    return Coverage(int(counts.min()), int(counts.max()))


def _counted(borders: Sequence[np.ndarray], starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """How many boxes hold each cell; starts and stops are [boxes, dims]."""
    counts = np.zeros([len(border) for border in borders], dtype=np.int64)
    for corner in itertools.product((0, 1), repeat=len(borders)):
        ends = ((stops if end else starts)[:, dim] for dim, end in enumerate(corner))
        where = tuple(map(np.searchsorted, borders, ends))
        np.add.at(counts, where, -1 if sum(corner) % 2 else 1)
    for dim in range(len(borders)):
        counts = np.cumsum(counts, axis=dim)
    return counts[tuple(slice(0, -1) for _ in borders)]
