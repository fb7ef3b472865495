# SPDX-License-Identifier: Apache-2.0
"""Numbers that functions pass on, process groups that they choose, and shards of parameters."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from megatron_ttrace.placement.mesh import AXES
from megatron_ttrace.trace.collectives import Function, Ledger, Numbers, Phase

_DATA = {"dp", "edp", "cp"}
EQUAL = 1e-3
"""How near a number must be to a factor."""


def origins(ledger: Ledger, expected: Numbers, ratios: Sequence[float]) -> set[int]:
    """Functions that make a number which is off by one of these ratios, or by its inverse.

    Such a function returns the number or passes it to others; it was not given it, and nothing that
    it calls has returned it. What the reference's functions are given and return is ``expected``. A
    data-parallel rank's share of that may yet be summed, and is not off.
    """
    calls = ledger.sources.calls
    off = [value for ratio in ratios for value in (ratio, 1 / ratio) if not _near(ratio, 1.0)]
    shares = {1} | {
        lookup.size for lookup in calls.lookups if not _DATA.isdisjoint(lookup.group.split("-"))
    }
    given: set[int] = set()
    returning: set[int] = set()
    for number, function in enumerate(calls.functions):
        right = expected.get(function.where, {})
        for name, values in ledger.numbers.get(function.where, {}).items():
            if _is_off(values, right.get(name, ()), off, shares):
                (given if name else returning).add(number)
    callees: dict[int, set[int]] = defaultdict(set)
    for call in calls.calls:
        callees[call.caller].add(call.function)
    return {
        number
        for number in {*callees, *returning} - given - {-1}
        if (number in returning or not given.isdisjoint(callees[number]))
        and returning.isdisjoint(callees[number] - {number})
    }


def _is_off(
    values: Iterable[float], right: Sequence[float], off: Sequence[float], shares: Collection[int]
) -> bool:
    """Whether a number that the reference lacks is one of the reference's times a factor."""
    return any(
        _near(value, expected * factor)
        for value in values
        if not any(_near(value * size, expected) for size in shares for expected in right)
        for expected in right
        for factor in off
    )


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= EQUAL * abs(other)


def is_given(
    ledger: Ledger, expected: Numbers, function: Function, ratios: Sequence[float]
) -> bool:
    """Whether a factor that a function was given is one of these ratios, or its inverse.

    The backward pass of an autograd function uses what other methods of it were given. A factor
    that the reference's function was not given is to be blamed on what gave it.
    """
    head, _, name = function.name.rpartition(".")
    users: Sequence[Function] = [function]
    if head and name == "backward":
        known = ledger.sources.calls.functions
        users = [each for each in known if each.name.startswith(f"{head}.")]
    return any(
        abs(abs(value) / ratio - 1) < EQUAL < abs(ratio - 1)
        for user in users
        for factor in user.factors
        for value in _shared(user.where, factor, ledger.numbers, expected)
        for each in ratios
        for ratio in (each, 1 / each)
    )


def _shared(where: str, name: str, numbers: Numbers, expected: Numbers) -> list[float]:
    """The values of a number that the reference also has, or all if it has none."""
    values, right = (known.get(where, {}).get(name, ()) for known in (numbers, expected))
    return [v for v in values if not right or any(_near(v, each) for each in right)]


def without(ledger: Ledger, axes: set[str]) -> set[int]:
    """Functions of the step that name one of these axes, and choose only groups over others."""
    calls = ledger.sources.calls
    chosen: dict[int, list[bool]] = defaultdict(list)
    for lookup in calls.lookups:
        if lookup.phase is not Phase.CONSTRUCTION:
            spanned = {*lookup.group.split("-")}
            # Which axes a group without such a name spans is not known.
            may_fit = lookup.size > 1 and (not spanned <= {*AXES} or not spanned.isdisjoint(axes))
            chosen[lookup.function].append(may_fit)
    return {
        number
        for number, fits in chosen.items()
        if not any(fits) and not axes.isdisjoint(calls.functions[number].axes)
    }
