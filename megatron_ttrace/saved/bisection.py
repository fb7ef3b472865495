# SPDX-License-Identifier: Apache-2.0
"""Searches that need few checks: the first bad commit, the smallest set of parts that diverges."""

import dataclasses
from collections.abc import Callable, Sequence

from megatron_ttrace.trace.records import Result


@dataclasses.dataclass(frozen=True, slots=True)
class FirstBad:
    """Where a line of commits turns bad.

    Attributes:
        number: of the first one known to be bad.
        suspects: those before it that could not be checked, since the last good one.
    """

    number: int
    suspects: tuple[int, ...]


def first_bad(
    count: int, check: Callable[[int], Result], pivots: Sequence[int] = ()
) -> FirstBad | None:
    """Bisect ``count`` commits that follow a good one; the last is checked first.

    Of 64 commits that can all be checked, 7 are. ``pivots`` are numbers of commits to check before
    those in the middle.

    Returns:
        ``None`` when the last commit is not bad, so that there is nothing to find.
    """
    if check(count - 1) is not Result.DIVERGED:
        return None
    good, bad = -1, count - 1
    skipped: set[int] = set()
    while candidates := [number for number in range(good + 1, bad) if number not in skipped]:
        # The one nearest to the middle that can perhaps be checked.
        nearest = min(candidates, key=lambda number: abs(2 * number - good - bad))
        middle = next((number for number in pivots if number in candidates), nearest)
        answer = check(middle)
        if answer is Result.COULD_NOT_CHECK:
            skipped.add(middle)
        elif answer is Result.DIVERGED:
            bad = middle
        else:
            good = middle
    return FirstBad(bad, tuple(number for number in sorted(skipped) if good < number < bad))


def smallest[T](parts: Sequence[T], diverges: Callable[[Sequence[T]], bool]) -> list[T]:
    """A smallest subset that still diverges: without any single part of it, it no longer does.

    Delta debugging (Zeller and Hildebrandt, IEEE Transactions on Software Engineering 28, 2002):
    large groups of parts are left out first. The order of the parts is kept.
    """
    kept = list(parts)
    size = len(kept)
    while size:
        start, before = 0, len(kept)
        while start < len(kept):
            without = kept[:start] + kept[start + size :]
            if diverges(without):
                kept = without
            else:
                start += size
        # A part may be needed only by one that is left out after it.
        size = min(size // 2, len(kept)) if size > 1 else int(len(kept) < before)
    return kept


@dataclasses.dataclass(frozen=True, slots=True)
class Causes[T]:
    """Parts that make the whole bad.

    Attributes:
        sets: each is bad alone, and without any single part of it no longer; the first found first.
        without: the answer for all other parts together.
    """

    sets: tuple[tuple[T, ...], ...]
    without: Result


def causes[T](
    parts: Sequence[T], check: Callable[[Sequence[T]], Result], pivots: Sequence[int] = ()
) -> Causes[T]:
    """The smallest sets of parts that are bad by themselves, until the rest is bad no more.

    One bad part of ``n`` is found and proven in log2(n) + 5 checks, and one more for each pivot;
    each further part that only matters together with it costs about log2(n) + 3.

    Parts are hashable, likely ones first; ``pivots`` are numbers of those after which others are
    much less likely. ``check`` is asked only once for each set, with its parts in their order.

    Returns:
        No sets when all parts together are not bad, or none of them is not good.
    """
    number = {part: position for position, part in enumerate(parts)}
    known: dict[frozenset[T], Result] = {}

    def ask(some: Sequence[T]) -> Result:
        key = frozenset(some)
        if key not in known:
            known[key] = check(sorted(some, key=number.__getitem__))
        return known[key]

    if ask(parts) is not Result.DIVERGED or ask(()) is not Result.EQUIVALENT:
        return Causes((), ask(parts))
    remaining = list(parts)
    sets: list[tuple[T, ...]] = []
    while (answer := ask(remaining)) is Result.DIVERGED:
        sets.append(tuple(_cause(remaining, ask, pivots)))
        remaining = [part for part in remaining if part not in sets[-1]]
        pivots = ()
    return Causes(tuple(sets), answer)


def _cause[T](
    parts: Sequence[T], ask: Callable[[Sequence[T]], Result], pivots: Sequence[int]
) -> list[T]:
    """Parts that are bad together, though none of them can be left out.

    The shortest beginning of the parts that is bad needs its last part. With that given, the
    shortest beginning that is bad needs another one, and so on, until nothing else is needed.
    """
    pool, kept = list(parts), list[T]()

    def ask_first(last: int) -> Result:
        return ask([*pool[: last + 1], *kept])

    while not kept or ask(kept) is not Result.DIVERGED:
        where = first_bad(len(pool), ask_first, pivots)
        if where is None:
            raise ValueError("all parts of the pool, with what is kept, are not bad")
        begin = min((*where.suspects, where.number))
        kept = pool[begin : where.number + 1] + kept
        pool = pool[:begin]
    return smallest(kept, lambda some: ask(some) is Result.DIVERGED)
