# SPDX-License-Identifier: Apache-2.0
"""The record of what a rank counted, and ranks as runs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import counted, folded
from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.counted import (
    Counted,
    Counting,
    Hyperparameters,
    Part,
    Statistic,
    Sum,
    Term,
    ranks_of,
    runs_of,
)

PART = Part("a.weight", (4, 2), (Box((2, 0), (2, 2), (0, 0)),))
NORM = Counting(
    Statistic.GRAD_NORM,
    (Sum(((0, 6, 2),), 0, (Term(0, 2),)), Sum(((0, 1, 1),), 0, (), (Term(0),))),
    (),
    (Term(1),),
)


@given(st.sets(st.integers(0, 200)))
def test_runs(ranks: set[int]) -> None:
    """Every set of ranks is read back."""
    assert list(ranks_of(runs_of(ranks))) == sorted(ranks)


def test_a_large_world_is_short() -> None:
    """All ranks, and every eighth of them, are one run."""
    assert runs_of(range(16_384)) == ((0, 16_383, 1),)
    assert len(runs_of(range(3, 16_384, 8))) == 1


SIZES = st.integers(0, 3)
BOXES = st.builds(lambda *dims: Box(*dims), *[st.lists(SIZES, max_size=3).map(tuple)] * 3)
PARTS = st.builds(
    Part, st.text("ab"), st.lists(SIZES, max_size=3).map(tuple), st.lists(BOXES).map(tuple)
)
RANKS = st.sets(st.integers(0, 40)).map(runs_of)


@st.composite
def records(draw):
    """Anything that a rank can have counted; parts of reductions have a first dim, or not."""
    parts = draw(st.lists(PARTS, max_size=6))
    if parts and draw(st.booleans()):
        own = Box((draw(SIZES), 2, 0), (1, 2, 2), (0, 0, 0))
        parts += [Part(f"p{n}", (4, 4, 4), (own,)) for n in range(3)]

    def terms(known):
        numbers = st.integers(0, known - 1) if known else st.nothing()
        listed = st.lists(st.builds(Term, numbers, st.integers(1, 3)), max_size=5 * bool(known))
        return draw(listed.map(tuple))

    countings = []
    for statistic in draw(st.lists(st.sampled_from(Statistic), max_size=4)):
        made = [
            Sum(draw(RANKS), order, terms(len(parts)), terms(order))
            for order in range(draw(st.integers(0, 3)))
        ]
        countings.append(
            Counting(
                statistic=statistic,
                made=tuple(made),
                parts=terms(len(parts)),
                sums=terms(len(made)),
                value=draw(st.floats()),
                unknown=draw(st.text("?")),
            )
        )
    held = tuple(term.number for term in terms(len(parts)))
    groups = [Hyperparameters(tuple(map(Term, held)), (("lr", draw(st.floats(0, 1))),))]
    return Counted(draw(st.integers(0, 9)), tuple(parts), held, tuple(countings), tuple(groups))


@settings(max_examples=40)
@given(records())
def test_a_record_comes_back(record):
    """Through JSON text; a compact one also with what other messages have in common."""
    read = counted.decode(json.loads(json.dumps(counted.encode([record]))))
    assert str(read) == str((record,))
    message, once = json.loads(json.dumps(counted.compact(record))), folded.Once()
    for _ in range(2):
        assert str(counted.expanded(message, once)) == str(record)


def test_replicas_have_compact_parts_in_common():
    """Their records are otherwise different: each has its own number in the reduction."""
    terms = tuple(Term(number) for number in range(100))
    reduced = Counting(Statistic.REDUCED, (Sum(((0, 63, 1),), 0, terms),), (), (Term(0),))
    messages = []
    for rank in range(64):
        box = Box((rank, 0), (1, 4), (0, 0))
        parts = tuple(Part(f"layers.{n}.weight", (64, 4), (box,)) for n in range(100))
        messages.append(folded.fold({rank: counted.compact(Counted(1, parts, (), (reduced,)))}))
    one, all_ranks = (len(json.dumps(folded.merge(some))) for some in (messages[:1], messages))
    assert all_ranks < one + 64 * 100


@pytest.mark.parametrize(
    "record",
    [
        Counted(1, (PART,), (1,), ()),
        Counted(1, (), (), (NORM,)),
        Counted(1, (PART,), (), (Counting(Statistic.NUM_ZEROS, (), (), (Term(0),)),)),
        Counted(1, (PART,), (), (Counting(Statistic.NUM_ZEROS, (Sum((), 0, (), (Term(0),)),)),)),
    ],
)
def test_a_number_without_its_record(record: Counted) -> None:
    """Parts that do not exist, and sums that are not made before they are used."""
    with pytest.raises(CodecError):
        counted.decode(counted.encode([record]))
    with pytest.raises(CodecError):
        counted.expanded(counted.compact(record), folded.Once())
