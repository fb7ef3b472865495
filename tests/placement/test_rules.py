# SPDX-License-Identifier: Apache-2.0
"""What rules refuse, the boxes of flat ranges, and words; test_merge.py has what ranks keep."""

import pytest

from megatron_ttrace.placement.boxes import Box, Segment, whole
from megatron_ttrace.placement.placements import (
    BlockShard,
    FlatShard,
    GroupShard,
    PartShard,
    Shard,
    ZigZag,
)


@pytest.mark.parametrize(
    ("rule", "total", "size", "says"),
    [
        (Shard(0), 7, 2, "a dim of 7 is not divisible by 2"),
        (BlockShard(0), 7, 2, "a dim of 7 does not divide into 2 equal blocks"),
        (BlockShard(0), 6, 2, "a dim of 3 is not divisible by 2"),
        (GroupShard(0, 2), 2, 3, "3 ranks do not divide into 2 groups"),
        (ZigZag(0), 6, 2, "a sequence of 6 does not divide into 4 chunks"),
        (PartShard(0, 2, 4), 8, 3, "3 ranks do not have 2 parts equally often"),
        (PartShard(0, 2, 4), 9, 2, "a dim of 9 is longer than 2 parts of 4"),
    ],
)
def test_what_does_not_divide_is_refused(rule, total, size, says):
    """No rank gets a rounded share: the error says which number does not divide."""
    with pytest.raises(ValueError, match=says):
        rule.divide(whole(total), 0, size)


def test_neighbouring_chunks_become_one_segment():
    """The middle rank of a zig-zag holds two chunks that touch: one box, not two."""
    assert ZigZag(0).divide(whole(8), 1, 2) == (Segment(0, 2, 4),)
    assert len(ZigZag(0).divide(whole(8), 0, 2)) == 2


def test_parts_end_with_padding():
    """Two of three parts of four rows hold a dim of six; so do ranks 3 to 5."""
    held = [PartShard(0, 3, 4).divide(whole(6), rank, 6) for rank in range(6)]
    assert held[:3] == [(Segment(0, 0, 4),), (Segment(0, 4, 2),), ()]
    assert held[3:] == held[:3]


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (0, 13), (5, 4)])
def test_a_flat_range_outside_the_tensor_is_refused(start, end):
    """A range that does not fit would silently compare the wrong elements."""
    with pytest.raises(ValueError, match="exceeds a tensor of 12"):
        FlatShard(start, end).boxes([whole(3), whole(4)])


def test_flat_shard_of_scalars_and_vectors():
    """One element of a 0-dim tensor, and a part of a vector."""
    assert FlatShard(0, 1).boxes([]) == (Box((), (), (0,)),)
    assert FlatShard(0, 0).boxes([]) == ()
    assert FlatShard(2, 5).boxes([whole(8)]) == (Box((2,), (3,), (0,)),)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Shard(1), "Shard(1)"),
        (BlockShard(0), "BlockShard(0, 2)"),
        (ZigZag(0), "ZigZag(0)"),
        (GroupShard(2, 4), "GroupShard(2, 4)"),
        (PartShard(0, 2, 16), "PartShard(0, 2)"),
        (FlatShard(3, 9), "FlatShard(3, 9)"),
    ],
)
def test_the_words_of_reports(rule, text):
    """Upstream Megatron's vocabulary, as it is printed in reports."""
    assert str(rule) == text
