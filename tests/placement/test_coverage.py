# SPDX-License-Identifier: Apache-2.0
"""Holders of every element: tables, and a count by brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.coverage import Coverage, coverage


def box(logical, extent):
    """A box whose local side does not matter."""
    return Box(tuple(logical), tuple(extent), tuple(0 for _ in logical))


@pytest.mark.parametrize(
    ("shape", "boxes", "least", "most"),
    [
        ((4,), [box([0], [3])], 0, 1),
        ((4,), [box([0], [3]), box([2], [2])], 1, 2),
        ((), [box([], [])], 1, 1),
        ((), [box([], []), box([], [])], 2, 2),
        ((), [], 0, 0),
        ((0, 3), [], 1, 1),
    ],
)
def test_table(shape, boxes, least, most):
    """Holes, overlaps, replicas, scalars and empty tensors."""
    holders = coverage(shape, boxes)
    assert holders == Coverage(least, most)
    assert holders.complete == (least > 0)
    assert holders.even == (least == most)


@pytest.mark.parametrize("bad", [box([3], [2]), box([-1], [2]), box([5], [1])])
def test_a_box_outside_the_tensor_is_an_error(bad):
    """Elements beyond the border would hide a hole elsewhere."""
    with pytest.raises(ValueError, match=r"exceeds a tensor of shape \(4,\)"):
        coverage((4,), [bad])


@given(st.data())
def test_against_counting_every_element(data):
    """Random boxes in up to three dims, counted one element at a time."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    count = np.zeros(shape, dtype=int)
    boxes = []
    for _ in range(data.draw(st.integers(0, 8))):
        start = [data.draw(st.integers(0, size - 1)) for size in shape]
        extent = [
            data.draw(st.integers(0, size - first))
            for first, size in zip(start, shape, strict=True)
        ]
        boxes.append(box(start, extent))
        count[tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))] += 1
    assert coverage(shape, boxes) == Coverage(count.min(), count.max())


def test_within() -> None:
    """Only the elements that are asked for are counted."""
    rows = [Box((row, 0), (1, 3), (0, 0)) for row in range(4)]
    assert coverage((4, 3), [rows[1], rows[1]], rows[1:2]) == Coverage(2, 2)
    assert coverage((4, 3), [rows[1]], rows[1:3]) == Coverage(0, 1)
    assert coverage((4, 3), [rows[1]], []) == Coverage(1, 1)
