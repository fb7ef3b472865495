# SPDX-License-Identifier: Apache-2.0
"""The merged candidate equals a tensor assembled by hand, for every placement and nesting."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.placement.boxes import merge, product, rows, take, whole
from megatron_ttrace.placement.coverage import coverage
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.placement.placements import BlockShard, FlatShard, GroupShard, Shard, ZigZag
from megatron_ttrace.placement.plan import Step, describe, plan
from tests.placement.by_hand import (
    Assembled,
    chunk,
    gated_chunk,
    group_chunk,
    local_shape,
    meshes,
    numbered,
    zigzag,
)

CP = Step("cp", ZigZag(0))
PACKED = Step("cp", ZigZag(0, (4, 16, 24)))
BY_HAND = {Shard: chunk, BlockShard: gated_chunk, GroupShard: group_chunk, ZigZag: zigzag}


def cut(logical, placement, mesh):
    """This rank's local tensor, cut by hand."""
    local = logical
    for step in placement:
        if isinstance(step.placement, FlatShard):
            return local.reshape(-1)[step.placement.start : step.placement.end].copy()
        blocks = (step.placement.blocks,) if isinstance(step.placement, BlockShard) else ()
        if isinstance(step.placement, GroupShard):
            blocks = (step.placement.parts,)
        ends = step.placement.ends if isinstance(step.placement, ZigZag) else ()
        cutter = BY_HAND[type(step.placement)]
        where = (mesh.at(step.axis), mesh.size(step.axis))
        dim = step.placement.dim
        pieces = np.split(local, ends[:-1], axis=dim)
        local = np.concatenate([cutter(piece, dim, *where, *blocks) for piece in pieces], axis=dim)
    return local


def check(shape, placement, ranks, *, flats=None, holders=None):
    """Cut by hand, merge through boxes, compare; every element is held by ``holders`` ranks.

    ``flats`` lists the ZeRO ranges that the ranks of a mesh have, one rank after the other.
    """
    logical = numbered(*shape)
    merged = Assembled(shape)
    boxes = []
    for mesh in ranks:
        for flat in flats or [None]:
            here = placement if flat is None else (*placement, Step("dp", FlatShard(*flat)))
            local = cut(logical, here, mesh)
            assert local.shape == local_shape(shape, here, mesh)
            planned = plan(shape, here, mesh)
            merged.write(local, planned)
            boxes += planned
    np.testing.assert_array_equal(merged.values, logical)
    covered = coverage(shape, boxes)
    assert (covered.least, covered.most) == (merged.holders.min(), merged.holders.max())
    if holders is not None:
        assert (merged.holders == holders).all()


CASES = [
    # name, shape, placement, sizes of the mesh, replicas
    ("whole", (3, 4), (), {}, 1),
    ("scalar", (), (), {"tp": 2}, 2),
    ("replicate over tp", (3, 4), (), {"tp": 3}, 3),
    ("replicate over dp", (4,), (Step("tp", Shard(0)),), {"tp": 2, "dp": 3}, 3),
    ("column parallel", (8, 3), (Step("tp", Shard(0)),), {"tp": 4}, 1),
    ("row parallel", (3, 8), (Step("tp", Shard(1)),), {"tp": 4}, 1),
    ("hidden of an activation", (4, 2, 6), (Step("tp", Shard(2)),), {"tp": 2, "cp": 1}, 1),
    ("gated", (16, 3), (Step("tp", BlockShard(0)),), {"tp": 4}, 1),
    ("unequal blocks", (12, 3), (Step("tp", BlockShard(0, (2, 1))),), {"tp": 2}, 1),
    ("gated activation", (2, 1, 12), (Step("tp", BlockShard(2)),), {"tp": 3}, 1),
    ("three blocks", (12, 2), (Step("tp", BlockShard(0, 3)),), {"tp": 2}, 1),
    ("groups", (4, 1, 2, 3), (Step("tp", GroupShard(2, 2)),), {"tp": 4}, 2),
    ("groups under cp", (8, 2, 3), (CP, Step("tp", GroupShard(1, 2))), {"cp": 2, "tp": 6}, 3),
    ("sequence parallel", (8, 2, 3), (Step("tp", Shard(0)),), {"tp": 4}, 1),
    ("context parallel", (16, 2, 3), (Step("cp", ZigZag(0)),), {"cp": 4}, 1),
    ("packed", (24, 2), (PACKED, Step("tp", Shard(0))), {"cp": 2, "tp": 3}, 1),
    ("tokens under cp", (2, 8), (Step("cp", ZigZag(1)),), {"cp": 2, "tp": 2}, 2),
    ("cp then sp", (16, 1, 3), (CP, Step("tp", Shard(0))), {"cp": 2, "tp": 4}, 1),
    ("cp then sp odd", (24, 2), (CP, Step("tp", Shard(0))), {"cp": 2, "tp": 3}, 1),
    ("cp then hidden", (8, 1, 6), (CP, Step("tp", Shard(2))), {"cp": 2, "tp": 3}, 1),
    (
        "cp then gated",
        (8, 1, 12),
        (Step("cp", ZigZag(0)), Step("tp", BlockShard(2))),
        {"cp": 2, "tp": 3, "dp": 2},
        2,
    ),
    ("expert tensor axis", (6, 4), (Step("etp", Shard(1)),), {"tp": 2, "etp": 2}, 2),
]


@pytest.mark.parametrize(
    ("shape", "placement", "sizes", "replicas"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_merged_equals_by_hand(shape, placement, sizes, replicas):
    """Every placement that Megatron uses, nested ones too."""
    check(shape, placement, meshes(**sizes), holders=replicas)


def cuts(total, borders):
    """Consecutive ranges between sorted borders."""
    edges = [0, *sorted(borders), total]
    return list(itertools.pairwise(edges))


@given(st.data())
def test_sharded_then_flat(data):
    """ZeRO ranges cut a tensor-parallel shard anywhere; all ranks together hold all of it."""
    tp = data.draw(st.integers(1, 3), "tp")
    rank_rule = data.draw(
        st.sampled_from([Shard(0), Shard(1), BlockShard(0), BlockShard(1), ZigZag(0), ZigZag(1)])
    )
    unit = {Shard: 1, BlockShard: 2, ZigZag: 2}[type(rank_rule)] * tp
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3), "shape")
    shape[rank_rule.dim] *= unit
    total = int(np.prod(shape)) // tp
    borders = data.draw(st.lists(st.integers(0, total), max_size=5), "borders")
    axis = "cp" if isinstance(rank_rule, ZigZag) else "tp"
    check(
        shape,
        (Step(axis, rank_rule),),
        meshes(**{axis: tp}),
        flats=cuts(total, borders),
        holders=1,
    )


@given(st.data())
def test_context_then_tensor_then_flat(data):
    """Three divisions, one inside the other, on the same dim or on two."""
    cp, tp = data.draw(st.integers(1, 3), "cp"), data.draw(st.integers(1, 3), "tp")
    inner = data.draw(st.sampled_from([Shard(0), Shard(1), BlockShard(1)]))
    shape = [2 * cp * tp * data.draw(st.integers(1, 2)), 2 * tp * data.draw(st.integers(1, 2))]
    shape += data.draw(st.sampled_from([[], [1], [2]]))
    total = int(np.prod(shape)) // (cp * tp)
    flats = data.draw(
        st.one_of(
            st.none(), st.lists(st.integers(0, total), max_size=3).map(lambda b: cuts(total, b))
        )
    )
    check(
        shape,
        (Step("cp", ZigZag(0)), Step("tp", inner)),
        meshes(cp=cp, tp=tp),
        flats=flats,
        holders=1,
    )


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_rows_are_row_major_and_few(shape, data):
    """``rows`` cuts a range into at most 2d-1 blocks that follow each other in memory."""
    total = int(np.prod(shape, dtype=int))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    order = np.arange(total).reshape(shape)
    blocks = list(rows(start, stop, shape))
    rows_of_blocks = [
        order[tuple(slice(o, o + n) for o, n in zip(*block, strict=True))].reshape(-1)
        for block in blocks
    ]
    assert np.concatenate([*rows_of_blocks, []]).tolist() == list(range(start, stop))
    assert len(blocks) <= max(1, 2 * len(shape) - 1)


def test_taking_renumbers_and_merging_fuses():
    """``take`` starts at local 0 again, ``merge`` leaves real jumps alone."""
    gated = BlockShard(0).divide(whole(8), 1, 2)
    assert [(s.local, s.logical, s.length) for s in gated] == [(0, 2, 2), (2, 6, 2)]
    assert [(s.local, s.logical, s.length) for s in take(gated, 1, 3)] == [(0, 3, 1), (1, 6, 1)]
    assert merge(gated) == gated
    assert merge(take(whole(8), 0, 3)) == whole(3)


def test_an_empty_dim_has_no_boxes_and_a_scalar_has_one():
    """0 elements: nothing to compare. 0 dims: one element."""
    assert plan((0, 4), (), SINGLE) == ()
    assert len(product([])) == 1
    assert product([])[0].numel == 1


def test_placements_that_cannot_be():
    """A flat range is the innermost step, and a step's dim must exist."""
    with pytest.raises(ValueError, match="FlatShard must be the last step"):
        plan((4,), (Step("dp", FlatShard(0, 2)), Step("tp", Shard(0))), SINGLE)
    with pytest.raises(ValueError, match=r"tp:Shard\(2\) names a dim that a tensor \(4, 4\) lacks"):
        plan((4, 4), (Step("tp", Shard(2)),), SINGLE)


def test_the_words_of_a_placement():
    """Reports print the steps, outermost first."""
    assert describe(()) == "Replicate"
    steps = (Step("cp", ZigZag(0)), Step("tp", Shard(0)), Step("dp", FlatShard(0, 7)))
    assert describe(steps) == "cp:ZigZag(0) tp:Shard(0) dp:FlatShard(0, 7)"
