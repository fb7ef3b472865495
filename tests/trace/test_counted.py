# SPDX-License-Identifier: Apache-2.0
"""The record of what a rank counted, and ranks as runs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import counted
from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.counted import (
    Counted,
    Counting,
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


def test_round_trip() -> None:
    """Through JSON text."""
    record = Counted(3, (PART,), (0,), (NORM, Counting(Statistic.CLIPPED, value=float("nan"))))
    read = counted.decode(json.loads(json.dumps(counted.encode([record]))))
    assert str(read) == str((record,))


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
