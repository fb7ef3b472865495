# SPDX-License-Identifier: Apache-2.0
"""Which of the user's changes are near a failure."""

from collections.abc import Container, Iterable, Mapping

from megatron_ttrace.diagnose.code import BUILDING, Code
from megatron_ttrace.diagnose.ran import PARTS, ran_in
from megatron_ttrace.trace.collectives import Phase, pattern
from megatron_ttrace.trace.executed import ChangedFunction
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import ROOT, Direction, Kind

MOST = 3
"""Places that are reported."""
_OF_USER = {Clue.CHANGED, Clue.FILE_CHANGED, Clue.REPLACES}
"""Clues of what the user changed."""
_FEW = 3
"""Changes that say something wherever they ran."""
_BEFORE = {Phase.INITIALIZATION, Phase.CONSTRUCTION}


def nearest(
    changed: Iterable[ChangedFunction], code: Code, suspects: Container[int], verdict: Judged
) -> tuple[Mapping[int, ChangedFunction], set[int]]:
    """By number: what ran in the culprit, else around it, else before the step; and what is far.

    What starts the part of the step that the culprit belongs to is a part of it. What ran before
    the step may have built another module, the optimizer or the scheduler: that is far from what
    modules compute, as are constructors if what ran afterwards was changed too.
    """
    ran = {number: function for function in changed for number in code.changed(function)}
    is_reported = verdict.kind is Kind.LOSS  # and averaged by what runs the schedule
    parts = (Phase.SCHEDULE,) if is_reported else PARTS.get(verdict.direction, ())
    entering = code.entering(parts)
    inside = {
        number: function
        for number, function in ran.items()
        if number in suspects
        or number in entering
        or ran_in(function, verdict.name, verdict.direction)
    }
    outer = {number: _around(function, verdict) for number, function in ran.items()}
    around: dict[int, ChangedFunction] = {}
    for is_built in (False, True):
        alike = [number for number in ran if is_built is not bool(code.contexts[number])]
        nearby = max((outer[number] for number in alike), default=0)
        around |= {number: ran[number] for number in alike if nearby and outer[number] == nearby}
    early = {number: ran[number] for number in ran if number in code.at[BUILDING]}
    # Of a constructor alone, what runs around the culprit may use the module wrongly.
    near = inside if any(map(code.contexts.get, inside)) else inside | around
    in_modules = verdict.direction in (Direction.FORWARD, Direction.BACKWARD)
    if not near:
        return early, {*early} if in_modules else set()
    built = {number for number in near if not code.contexts[number]}
    is_computed = in_modules or verdict.kind is Kind.BUFFER
    return near, built if is_computed and built != near.keys() else set()


def _around(function: ChangedFunction, verdict: Judged) -> int:
    """The length of the name of the innermost module around the culprit that it ran in, from 1.

    The whole model is around all of them.
    """
    name = pattern(module_of(verdict.name))
    modules = (m for m in function.modules if m == ROOT or name.startswith(f"{m}."))
    return max((1 if m == ROOT else 1 + len(m) for m in modules), default=0)


def with_elsewhere(
    places: list[Place],
    changed: Iterable[ChangedFunction],
    code: Code,
    anchor: int | None = None,
    *,
    is_loaded: bool = False,
) -> list[Place]:
    """Places, or most of them with one of a few changes that ran in the traced steps.

    The user knows best what a change far away may have done: it is the last one, or the first if
    the ``anchor``, which had a part in the failure, is all that is known. For what was loaded it
    may also have run before the steps, and is the first one only if it led to the anchor.
    """
    relevant = (f for f in changed if is_loaded or not {*f.phases} <= _BEFORE)
    ran = {function: numbers for function in relevant if (numbers := code.changed(function))}
    ran = {f: numbers for f, numbers in ran.items() if f.function or len(numbers) == 1}
    if not ran or len(ran) > _FEW or any(place.clue in _OF_USER for place in places):
        return places
    function, numbers = next(iter(ran.items()))
    first = code.functions[numbers[0]]
    name = first.name if len(numbers) == 1 else function.function
    place = Place(function.file, function.line or first.line, name, function.clue)
    led = code.chain(anchor, BUILDING) if is_loaded and anchor is not None else numbers
    is_alone = all(other.clue is Clue.RAN for other in places) and len(places) <= 1
    if is_alone and not {*led}.isdisjoint(numbers):
        return [place, *places]
    return [*places[: MOST - 1], place]
