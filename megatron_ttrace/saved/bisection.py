# SPDX-License-Identifier: Apache-2.0
"""Searches that need few checks: the first bad commit, the smallest set that still diverges."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence


class Answer(enum.Enum):
    """What a check found."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "could not be checked"


@dataclasses.dataclass(frozen=True, slots=True)
class FirstBad:
    """Where a line of commits turns bad.

    Attributes:
        number: of the first one known to be bad.
        suspects: those before it that could not be checked, since the last good one.
    """

    number: int
    suspects: tuple[int, ...]


def first_bad(count: int, check: Callable[[int], Answer]) -> FirstBad | None:
    """Bisect ``count`` commits that follow a good one; the last is checked first.

    Of 64 commits that can all be checked, 7 are.

    Args:
        count: of the commits.
        check: answers for the commit with this number.

    Returns:
        ``None`` when the last commit is not bad, so that there is nothing to find.
    """
    if check(count - 1) is not Answer.BAD:
        return None
    good, bad = -1, count - 1
    skipped: set[int] = set()
    while candidates := [one for one in range(good + 1, bad) if one not in skipped]:
        # The one nearest to the middle that can perhaps be checked.
        middle = min(candidates, key=lambda one: abs(2 * one - good - bad))
        answer = check(middle)
        if answer is Answer.SKIPPED:
            skipped.add(middle)
        elif answer is Answer.BAD:
            bad = middle
        else:
            good = middle
    return FirstBad(bad, tuple(one for one in sorted(skipped) if good < one < bad))


def smallest[T](parts: Sequence[T], diverges: Callable[[Sequence[T]], bool]) -> list[T]:
    """A smallest subset that still diverges: without any single part of it, it no longer does.

    Delta debugging (Zeller and Hildebrandt, IEEE Transactions on Software Engineering 28, 2002):
    large groups of parts are left out first.

    Args:
        parts: which together diverge; their order is kept.
        diverges: whether a subset still does.
    """
    kept = list(parts)
    size = len(kept)
    while size:
        start = 0
        while start < len(kept):
            without = kept[:start] + kept[start + size :]
            if diverges(without):
                kept = without
            else:
                start += size
        size = min(size // 2, len(kept)) if size > 1 else 0
    return kept
