# SPDX-License-Identifier: Apache-2.0
"""Rows of experts' tensors, found by the identity of their tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.mcore.roles import is_partial
from megatron_ttrace.placement.boxes import Segment
from megatron_ttrace.placement.infer import NoPlacementError
from megatron_ttrace.placement.token_index import (
    NOBODY,
    TokenIndex,
    ends_of,
    expert_boxes,
    match,
    token_positions,
)
from megatron_ttrace.trace.records import Kind
from tests.placement.meshes import mesh_of


def index(*rows):
    """From (microbatch, position, expert) triples."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return TokenIndex(columns[0], columns[1], columns[2])


THERE = index((0, 1, 0), (0, 2, 0), (0, 5, 0), (0, 0, 1), (0, 1, 1))
"""A reference's rows: sorted by expert and position."""


@pytest.mark.parametrize(
    ("here", "expected", "strangers"),
    [
        # the same rows in the same order: one run
        (THERE, (Segment(0, 0, 5),), 0),
        # one expert of them
        (index((0, 0, 1), (0, 1, 1)), (Segment(0, 3, 2),), 0),
        # two sources, the later part of the sequence first
        (index((0, 5, 0), (0, 1, 0), (0, 2, 0)), (Segment(0, 2, 1), Segment(1, 0, 2)), 0),
        # another microbatch's rows in between, and padding
        (
            index((0, 1, 0), (1, 2, 0), (0, 2, 0), (NOBODY, 0, 0)),
            (Segment(0, 0, 1), Segment(2, 1, 1)),
            0,
        ),
        # a token that the reference sent elsewhere, and one that came twice
        (index((0, 1, 0), (0, 3, 0)), (Segment(0, 0, 1),), 1),
        (index((0, 1, 0), (0, 1, 0)), (Segment(0, 0, 1),), 1),
        (index(), (), 0),
    ],
)
def test_match_table(here, expected, strangers):
    """Runs of rows that are consecutive on both sides; the rest is counted."""
    assert match(here, THERE, 0) == (expected, strangers)


def test_no_reference_rows():
    """Then every row is a stranger."""
    assert match(index((0, 1, 0)), index(), 0) == ((), 1)


@given(data=st.data())
def test_rows_come_home_from_any_order(data):
    """Whatever the order of arrival and however rows are spread, each finds its own."""
    experts, tokens, ranks = 3, 8, 2
    pairs = [
        (m, p, e)
        for m in range(2)
        for e in range(experts)
        for p in range(tokens)
        if data.draw(st.booleans(), label=f"{m} {p} {e}")
    ]
    there = {m: index(*[pair for pair in pairs if pair[0] == m]) for m in range(2)}
    owner = [data.draw(st.integers(0, ranks - 1)) for _ in pairs]
    held: dict[int, list[int]] = {0: [], 1: []}
    for rank in range(ranks):
        mine = [pair for pair, who in zip(pairs, owner, strict=True) if who == rank]
        mine = data.draw(st.permutations(mine))
        for m in range(2):
            segments, strangers = match(index(*mine), there[m], m)
            assert strangers == 0
            for segment in segments:
                for step in range(segment.length):
                    local, logical = segment.local + step, segment.logical + step
                    assert mine[local] == (
                        m,
                        there[m].position[logical],
                        there[m].expert[logical],
                    )
                    held[m].append(logical)
    for m in range(2):
        assert sorted(held[m]) == list(range(len(there[m].microbatch)))


def test_an_expert_has_its_own_rows():
    """As the modules of one expert see them."""
    mine = THERE.of_expert(1)
    assert mine.position.tolist() == [0, 1]
    assert mine.microbatches == [0]


def test_padding_of_quantised_products():
    """Each expert's rows are filled up to a multiple of 16 (or 32) with nobody's."""
    padded = THERE.fitted(32)
    assert padded.microbatch.tolist()[:3] == [0, 0, 0]
    assert set(padded.microbatch.tolist()[3:16]) == {NOBODY}
    assert padded.position.tolist()[16:18] == [0, 1]
    assert len(THERE.fitted(64).microbatch) == 64
    assert THERE.fitted(5) is THERE
    with pytest.raises(NoPlacementError, match="7 rows, where 5 tokens were dispatched"):
        THERE.fitted(7)


@pytest.mark.parametrize(
    ("local", "logical", "etp", "blocks", "words", "columns"),
    [
        ((5, 6), (5, 6), 1, 1, "TokenIndex(0)", [(0, 6)]),
        ((5, 3), (5, 6), 2, 1, "TokenIndex(0) etp:Shard(1)", [(3, 3)]),
        ((5, 4), (5, 8), 2, 2, "TokenIndex(0) etp:BlockShard(1, 2)", [(2, 2), (6, 2)]),
        (
            *((5, 4), (5, 8), 2, (3, 1)),
            *("TokenIndex(0) etp:BlockShard(1, (3, 1))", [(3, 3), (7, 1)]),
        ),
        ((5,), (5,), 2, 1, "TokenIndex(0)", [()]),
    ],
)
def test_columns_table(local, logical, etp, blocks, words, columns):
    """What expert tensor parallelism leaves the second of its ranks."""
    rows, _ = match(THERE, THERE, 0)
    mesh = mesh_of(1, 2, tp=2, etp=etp)
    placement, boxes = expert_boxes(rows, local, logical, mesh, blocks)
    assert placement == words
    dims = [(box.logical[1], box.extent[1]) if len(box.logical) > 1 else () for box in boxes]
    assert dims == columns


@pytest.mark.parametrize(("local", "logical"), [((5, 5), (5, 6)), ((5, 6, 1), (5, 6))])
def test_columns_that_fit_nothing(local, logical):
    """The shapes are refused, not guessed."""
    with pytest.raises(NoPlacementError):
        expert_boxes((), local, logical, mesh_of(0, 2, tp=2))


@pytest.mark.parametrize(
    ("kind", "module", "expected"),
    [
        (Kind.OUTPUT, "", True),
        (Kind.OUTPUT, "linear_fc2", True),
        (Kind.OUTPUT, "linear_fc1", False),
        # Inside Megatron-Bridge's adapter of the layer.
        (Kind.OUTPUT, "linear_fc2.to_wrap", True),
        (Kind.OUTPUT, "linear_fc2.adapter.linear_in", False),
        (Kind.GRAD_INPUT, "linear_fc1.to_wrap", True),
        (Kind.INPUT, "linear_fc2", False),
        (Kind.GRAD_INPUT, "", True),
        (Kind.GRAD_INPUT, "linear_fc1", True),
        (Kind.GRAD_INPUT, "linear_fc2", False),
        (Kind.GRAD_OUTPUT, "linear_fc2", False),
        (Kind.GRAD_OUTPUT, "", False),
    ],
)
def test_partial_table(kind, module, expected):
    """What the dispatcher adds up later."""
    assert is_partial(kind, module) is expected


@pytest.mark.parametrize(
    ("local", "rank", "sizes", "expected"),
    [
        ((8, 1), 0, {}, list(range(8))),
        ((4, 2), 0, {}, list(range(8))),
        ((4, 1), 1, {"tp": 2}, [4, 5, 6, 7]),
        ((4, 1), 0, {"cp": 2}, [0, 1, 6, 7]),
        ((2, 2), 1, {"cp": 2}, [2, 3, 4, 5]),
        ((2, 1), 1, {"tp": 2, "cp": 2}, [6, 7]),
    ],
)
def test_positions_table(local, rank, sizes, expected):
    """Sequence first, samples within; sequence and context parallel parts as they lie."""
    world = int(np.prod(list(sizes.values()), dtype=int))
    seq = len(expected) // local[1] * world
    positions = token_positions(local, mesh_of(rank, world, **sizes), seq)
    assert positions.tolist() == expected


def test_positions_of_packed_sequences():
    """Every sequence is divided."""
    positions = token_positions((6, 1), mesh_of(1, 2, cp=2), 12, (4, 12))
    assert positions.tolist() == [1, 2, 6, 7, 8, 9]


PACKED = 32


@given(st.lists(st.sets(st.integers(1, PACKED - 1)), min_size=1, max_size=3))
def test_ends_of_packed_sequences(samples):
    """Of all samples one after the other; what fills up the batch's rows is left out."""
    rows = [[0, *sorted(inner), *[PACKED] * (PACKED - len(inner))] for inner in samples]
    ends = ends_of(rows)
    assert ends == tuple(
        at * PACKED + end for at, inner in enumerate(samples) for end in (*sorted(inner), PACKED)
    )
