# SPDX-License-Identifier: Apache-2.0
"""Holders of every element: tables, a count by brute force, and a layout of 16,384 ranks."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.coverage import Coverage, coverage
from megatron_ttrace.placement.placements import BlockShard, FlatShard
from megatron_ttrace.placement.plan import Step, plan
from tests.placement.meshes import mesh_of


def box(logical, extent):
    """A box whose local side does not matter."""
    return Box(tuple(logical), tuple(extent), tuple(0 for _ in logical))


@pytest.mark.parametrize(
    ("shape", "boxes", "least", "most"),
    [
        ((4,), [], 0, 0),
        ((4,), [box([0], [4])], 1, 1),
        ((4,), [box([0], [3])], 0, 1),
        ((4,), [box([1], [3])], 0, 1),
        ((4,), [box([0], [2]), box([2], [2])], 1, 1),
        ((4,), [box([0], [3]), box([2], [2])], 1, 2),
        ((4,), [box([0], [4]), box([0], [4])], 2, 2),
        ((4,), [box([0], [0])], 0, 0),
        ((2, 2), [box([0, 0], [1, 2]), box([1, 0], [1, 1])], 0, 1),
        ((2, 2), [box([0, 0], [2, 2]), box([1, 1], [1, 1])], 1, 2),
        ((), [box([], [])], 1, 1),
        ((), [box([], []), box([], [])], 2, 2),
        ((), [], 0, 0),
        ((0, 3), [], 1, 1),
    ],
)
def test_table(shape, boxes, least, most):
    """Holes, overlaps, replicas, scalars and empty tensors."""
    found = coverage(shape, boxes)
    assert found == Coverage(least, most)
    assert found.complete == (least > 0)
    assert found.even == (least == most)


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


TP, CP, PP, DP = 8, 4, 8, 64
WORLD = TP * CP * PP * DP
SHAPE = (2 * 1024, 333)


def zero_boxes(skip=None):
    """All ranks' boxes of one gated weight under ZeRO, where the stage holds it."""
    part = SHAPE[0] * SHAPE[1] // TP
    edges = [part * i // (DP * CP) for i in range(DP * CP + 1)]
    boxes = []
    for rank in range(WORLD):
        mesh = mesh_of(rank, WORLD, tp=TP, cp=CP, pp=PP)
        if mesh.at("pp") != 3 or rank == skip:
            continue
        shard = mesh.at("dp") * CP + mesh.at("cp")
        steps = (
            Step("tp", BlockShard(0)),
            Step("dp", FlatShard(edges[shard], edges[shard + 1])),
        )
        boxes += plan(SHAPE, steps, mesh)
    return boxes


def test_16384_ranks_in_seconds():
    """tp 8 x cp 4 x pp 8 x dp 64 with flat shards: complete, and one lost rank is noticed."""
    began = time.process_time()
    boxes = zero_boxes()
    assert WORLD == 16384
    assert len(boxes) >= TP * CP * DP
    assert coverage(SHAPE, boxes) == Coverage(1, 1)
    assert time.process_time() - began < 5
    lost = mesh_rank(tp=5, cp=2, dp=31, pp=3)
    assert coverage(SHAPE, zero_boxes(skip=lost)) == Coverage(0, 1)


def mesh_rank(**at):
    """The rank with these coordinates."""
    for rank in range(WORLD):
        mesh = mesh_of(rank, WORLD, tp=TP, cp=CP, pp=PP)
        if all(mesh.at(axis) == where for axis, where in at.items()):
            return rank
    raise AssertionError(at)


def test_replicas_of_16384_ranks_are_counted():
    """Without ZeRO every element of a stage's weight has cp x dp replicas."""
    boxes = []
    for rank in range(WORLD):
        mesh = mesh_of(rank, WORLD, tp=TP, cp=CP, pp=PP)
        if mesh.at("pp") == 0:
            boxes += plan(SHAPE, (Step("tp", BlockShard(0)),), mesh)
    assert coverage(SHAPE, boxes) == Coverage(CP * DP, CP * DP)


def test_within() -> None:
    """Only the elements that are asked for are counted."""
    rows = [Box((row, 0), (1, 3), (0, 0)) for row in range(4)]
    assert coverage((4, 3), [rows[1], rows[1]], rows[1:2]) == Coverage(2, 2)
    assert coverage((4, 3), [rows[1]], rows[1:3]) == Coverage(0, 1)
    assert coverage((4, 3), [rows[1]], []) == Coverage(1, 1)
