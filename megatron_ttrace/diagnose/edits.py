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
from megatron_ttrace.trace.records import Direction, Kind

OF_USER = {Clue.CHANGED, Clue.FILE_CHANGED, Clue.REPLACES}
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
    entering = code.entering(PARTS.get(verdict.direction, ()))
    inside = {
        number: function
        for number, function in ran.items()
        if number in suspects
        or number in entering
        or ran_in(function, verdict.name, verdict.direction)
    }
    outer = {number: _around(function, verdict) for number, function in ran.items()}
    nearby = max(outer.values(), default=0)
    around = {number: ran[number] for number in ran if nearby and outer[number] == nearby}
    early = {number: ran[number] for number in ran if number in code.at[BUILDING]}
    near = inside or around
    in_modules = verdict.direction in (Direction.FORWARD, Direction.BACKWARD)
    if not near:
        return early, {*early} if in_modules else set()
    built = {number for number in near if not code.contexts[number]}
    is_computed = in_modules or verdict.kind is Kind.BUFFER
    return near, built if is_computed and built != near.keys() else set()


def _around(function: ChangedFunction, verdict: Judged) -> int:
    """The length of the name of the innermost module around the culprit that it ran in."""
    name = pattern(module_of(verdict.name))
    modules = (module for module in function.modules if name.startswith(f"{module}."))
    return max(map(len, modules), default=0)


def elsewhere(
    changed: Iterable[ChangedFunction], code: Code, *, is_loaded: bool = False
) -> list[Place]:
    """One of a few changes that ran in the traced steps, or also before, for what was loaded."""
    ran = [
        (function, number)
        for function in changed
        for number in code.changed(function)
        if is_loaded or not {*function.phases} <= _BEFORE
    ]
    places = [
        Place(function.file, function.line or code.functions[number].line, name, function.clue)
        for function, number in ran
        if (name := code.functions[number].name)
    ]
    return places[:1] if len(places) <= _FEW else []
