# SPDX-License-Identifier: Apache-2.0
"""Few checks are enough."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.saved.bisection import Answer, first_bad, smallest


def test_sixty_four_commits():
    """Seven checks at most, wherever the fault is."""
    for fault in range(64):
        asked = []

        def check(number, fault=fault, asked=asked):
            asked.append(number)
            return Answer.BAD if number >= fault else Answer.GOOD

        found = first_bad(64, check)
        assert (found.number, found.suspects) == (fault, ())
        assert len(asked) <= 7
        assert len(set(asked)) == len(asked)


@given(st.integers(1, 200), st.data())
def test_some_cannot_be_checked(count, data):
    """The fault is the commit found, or one of the suspects before it; no commit is asked twice."""
    fault = data.draw(st.integers(0, count - 1))
    skipped = data.draw(st.sets(st.integers(0, count - 1))) - {count - 1}
    asked = []

    def check(number):
        asked.append(number)
        if number in skipped:
            return Answer.SKIPPED
        return Answer.BAD if number >= fault else Answer.GOOD

    found = first_bad(count, check)
    assert fault in (found.number, *found.suspects)
    assert set(found.suspects) <= skipped
    if not skipped:
        assert found.suspects == ()
    assert len(set(asked)) == len(asked)


def test_nothing_to_find():
    """If the last one is good, or cannot be checked, no other is asked."""
    for answer in (Answer.GOOD, Answer.SKIPPED):
        asked = []
        assert first_bad(64, lambda number, a=answer, n=asked: n.append(number) or a) is None
        assert asked == [63]


@given(st.integers(0, 40), st.data())
def test_the_smallest_set(count, data):
    """What alone makes it diverge is all that is left, in its order."""
    parts = [*range(count)]
    needed = data.draw(st.sets(st.sampled_from(parts))) if parts else set()
    assert smallest(parts, lambda kept: needed <= set(kept)) == sorted(needed)


def test_either_of_two_is_enough():
    """One of them is left."""
    assert len(smallest("abcdef", lambda kept: "b" in kept or "e" in kept)) == 1


def test_few_of_many():
    """Far fewer checks than parts, where little is needed."""
    asked = []
    found = smallest(range(256), lambda kept: asked.append(1) or 77 in kept)
    assert found == [77]
    assert len(asked) < 40
