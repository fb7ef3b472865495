# SPDX-License-Identifier: Apache-2.0
"""Few checks are enough."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.saved.bisection import Causes, causes, first_bad, smallest
from megatron_ttrace.trace.records import Result


def log2(count):
    """Rounded up."""
    return (count - 1).bit_length()


def noted(is_bad, skipped=()):
    """A check that answers so, and what it was asked."""
    asked = []

    def check(what):
        asked.append(what if isinstance(what, int) else tuple(what))
        if what in skipped:
            return Result.COULD_NOT_CHECK
        return Result.DIVERGED if is_bad(what) else Result.EQUIVALENT

    return check, asked


@given(st.integers(1, 200), st.data())
def test_some_cannot_be_checked(count, data):
    """The fault is the commit found, or one of the suspects before it; no commit is asked twice."""
    fault = data.draw(st.integers(0, count - 1))
    skipped = data.draw(st.sets(st.integers(0, count - 1))) - {count - 1}
    check, asked = noted(lambda number: number >= fault, skipped)
    bad = first_bad(count, check)
    assert fault in (bad.number, *bad.suspects)
    assert set(bad.suspects) <= skipped
    if not skipped:
        assert bad.suspects == ()
        assert len(asked) <= log2(count) + 1
    assert len(set(asked)) == len(asked)


def test_nothing_to_find():
    """If the last one is good, or cannot be checked, no other is asked."""
    for answer in (Result.EQUIVALENT, Result.COULD_NOT_CHECK):
        asked = []
        assert first_bad(64, lambda number, a=answer, n=asked: n.append(number) or a) is None
        assert asked == [63]


@given(st.integers(0, 40), st.data())
def test_the_smallest_set(count, data):
    """What alone makes it diverge is all that is left, in its order."""
    parts = [*range(count)]
    needed = data.draw(st.sets(st.sampled_from(parts))) if parts else set()
    assert smallest(parts, lambda kept: needed <= set(kept)) == sorted(needed)


def test_a_part_that_is_needed_until_another_is_left_out():
    """No single part of what is left can be left out."""

    def diverges(kept):
        return "bad" in kept and ("use" not in kept or "definition" in kept)

    assert smallest(["definition", "use", "bad"], diverges) == ["bad"]


def test_few_of_many():
    """Far fewer checks than parts, where little is needed."""
    asked = []
    needed = smallest(range(256), lambda kept: asked.append(1) or 77 in kept)
    assert needed == [77]
    assert len(asked) < 40


@given(st.integers(1, 400), st.data())
def test_one_cause_among_harmless_changes(count, data):
    """It is found and proven in 2 log2(n) + 6 checks, none of them asked twice."""
    cause = data.draw(st.integers(0, count - 1))
    pivots = sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=2)))
    check, asked = noted(lambda parts: cause in parts)
    answer = causes([*range(count)], check, pivots)
    assert answer == Causes(((cause,),), Result.EQUIVALENT)
    assert {(cause,), (), tuple(part for part in range(count) if part != cause)} <= set(asked)
    assert len(set(asked)) == len(asked) <= 2 * log2(count) + 6
    assert len(asked) <= log2(count) + 5 + len(pivots)


@given(st.integers(1, 60), st.data())
def test_a_likely_cause_is_found_at_once(count, data):
    """With a pivot behind it, the number of unlikely parts hardly matters."""
    likely = data.draw(st.integers(1, min(count, 4)))
    cause = data.draw(st.integers(0, likely - 1))
    check, asked = noted(lambda parts: cause in parts)
    assert causes([*range(count)], check, [likely - 1]).sets == ((cause,),)
    assert len(asked) <= 8


@given(st.integers(1, 40), st.data())
def test_parts_that_matter_together_and_apart(count, data):
    """Each set that is found is bad, without any part of it no longer; the rest is not bad."""
    parts = [*range(count)]
    some = st.sets(st.sampled_from(parts), min_size=1, max_size=3)
    bad = data.draw(st.lists(some, min_size=1, max_size=3))
    broken = data.draw(st.lists(st.tuples(st.sampled_from(parts), st.sampled_from(parts))))

    def check(some):
        if 0 < len(some) < count and any((a in some) != (b in some) for a, b in broken):
            return Result.COULD_NOT_CHECK
        return Result.DIVERGED if any(cause <= set(some) for cause in bad) else Result.EQUIVALENT

    answer = causes(parts, check)
    assert answer.sets
    for cause in answer.sets:
        assert check(cause) is Result.DIVERGED
        assert not any(check([p for p in cause if p != part]) is Result.DIVERGED for part in cause)
    blamed = {part for cause in answer.sets for part in cause}
    assert (
        check([part for part in parts if part not in blamed])
        is answer.without
        is not Result.DIVERGED
    )


def test_no_cause():
    """Nothing to find: the parts are not bad together, or the reason is none of them."""
    for all_, none in ((Result.EQUIVALENT, Result.EQUIVALENT), (Result.DIVERGED, Result.DIVERGED)):
        answer = causes([1, 2], lambda some, a=all_, n=none: a if some else n)
        assert answer == Causes((), all_)
