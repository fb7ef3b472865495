# SPDX-License-Identifier: Apache-2.0
"""From verdicts to culprits: the modules whose inputs pass and whose result does not.

A step is a chain of cause and effect: start values, forward, loss, backward, gradients, update. A
failure in one stage makes everything after it differ, so culprits are looked for stage by stage and
the first stage that has any is the answer.

Megatron's own initial values, which nothing of the traced step comes from, are examined separately.

- start: a parameter, a token or an input of the model differs before anything was computed;
- missing: a module or parameter of the reference exists nowhere in the candidate;
- forward: all of a module's inputs pass, an output fails, and no module inside it explains that;
- backward: all of its output gradients pass, an input gradient fails;
- gradient: activations and activation gradients pass, a main gradient fails;
- update: main gradients pass, the change of a parameter or a moment fails.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_ttrace.diagnose.groups import Groups, group_of
from megatron_ttrace.diagnose.start import loaded
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import Explanation, Grounds
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.records import (
    LEFT,
    LOADS,
    MOMENTS,
    ROOT,
    STEP_LEVEL,
    Direction,
    Kind,
    Outcome,
)

Explain = Callable[[Judged], Explanation]

_SURFACING = 5.0
"""Growth of an error within one module that rounding does not explain."""

_ABSENT = (Outcome.MISSING, Outcome.EXTRA, Outcome.UNCOVERED)
_REDUCED, _STEPPED = Statistic.REDUCED.number, Statistic.STEPPED.number
_SPECIAL = dict.fromkeys([(Kind.METRIC, LEFT), (Kind.BUFFER, LOADS)], Grounds.LEFT_OVER)
_UPDATED = (Kind.HYPERPARAMETERS, *MOMENTS, Kind.PARAM_DELTA, Kind.PARAM, Kind.BUFFER)
"""In the order in which an optimizer's step computes them."""


class _Origin(NamedTuple):
    """A failure that is not a consequence of another one, and the module that it belongs to."""

    verdict: Judged
    module: str
    grounds: Grounds


def localise(
    verdicts: Sequence[Judged],
    explain: Explain = lambda verdict: Explanation(),
    *,
    isolated: bool = False,
) -> list[Diagnosis]:
    """Find the culprits of a run.

    Args:
        verdicts: of all tensors, in the reference's execution order.
        explain: finds out about the cause of a failed verdict.
        isolated: whether every tensor was computed from the reference's. Then no failure is the
            consequence of another one, and each is listed.

    Returns:
        Culprits of the earliest failing stage (of all stages, when isolated) of the earliest
        failing iteration, in execution order; one per module, with its worst tensor. Empty when
        nothing failed.
    """
    # The traced step starts from other values: nothing in it is a consequence of these.
    steps = [verdict for verdict in verdicts if verdict.kind not in (Kind.INITIAL, Kind.LOADED)]
    # Where several stages claim a layer, they hold initial values of different layers.
    claimed = {v.name for v in _failures(steps, Kind.PARAM) if v.verdict is Outcome.EXTRA}
    initial = [
        _Origin(verdict, owner(verdict.name), Grounds.INITIAL)
        for verdict in _failures(verdicts, Kind.INITIAL)
        if verdict.name not in claimed
    ]
    initial += [_Origin(v, owner(v.name), grounds) for v, grounds in loaded(verdicts)]
    failed = _failures(steps)
    first = min((verdict.iteration for verdict in failed), default=0)
    now = [verdict for verdict in steps if verdict.iteration == first]
    stages = [(Direction.START, initial)]
    if isolated:
        stages += [(direction, _each(now, direction)) for direction in Direction]
    elif failed:
        unexplained = [_Origin(failed[0], failed[0].name, Grounds.FIRST_FAILURE)]
        found = ((direction, origins(now)) for direction, origins in _STAGES)
        stages.append(
            next((one for one in found if one[1]), (failed[0].kind.direction, unexplained))
        )
    groups: Groups = {}
    return [
        culprit
        for direction, origins in stages
        for culprit in _one_per_module(origins, direction, explain, steps, groups)
    ]


def owner(parameter: str) -> str:
    """The module that a parameter belongs to."""
    return parameter.rpartition(".")[0] or parameter


def _failures(verdicts: Iterable[Judged], *kinds: Kind) -> list[Judged]:
    """Those that fail, of these kinds or of all."""
    return [v for v in verdicts if v.verdict.is_failure and (not kinds or v.kind in kinds)]


def _one_per_module(
    origins: Iterable[_Origin],
    direction: Direction,
    explain: Explain,
    verdicts: Sequence[Judged],
    groups: Groups,
) -> list[Diagnosis]:
    chosen: dict[str, _Origin] = {}
    for origin in origins:
        known = chosen.setdefault(origin.module, origin)
        if _severity(origin.verdict) > _severity(known.verdict):
            chosen[origin.module] = origin
    culprits = []
    for verdict, module, grounds in chosen.values():
        why = explain(verdict)
        before, alike = _around(verdict, verdicts)
        culprits.append(
            Diagnosis(
                name=f"{ROOT}.{why.argument}" if why.argument else module,
                direction=direction,
                grounds=grounds,
                verdict=verdict,
                before=before,
                alike=alike,
                why=why,
                group=group_of(groups, direction, verdict, grounds, why.finding),
            )
        )
    return culprits


def _around(
    verdict: Judged, verdicts: Sequence[Judged]
) -> tuple[Judged | None, tuple[Judged, ...]]:
    """The tensor before this one, if it passes; for one of the whole step, all of its kind."""
    if verdict.verdict in _ABSENT or verdict.direction is Direction.START:
        return None, ()
    verdicts = [one for one in verdicts if one.iteration == verdict.iteration]
    if verdict.microbatch == STEP_LEVEL:
        kind = verdict.kind, verdict.index
        return None, tuple(one for one in verdicts if (one.kind, one.index) == kind)
    before = None
    for other in verdicts:
        if other.key == verdict.key:
            break
        if other.microbatch == verdict.microbatch and other.kind is not Kind.TOKENS:
            before = other if other.verdict is Outcome.PASS else None
    return before, ()


def _severity(verdict: Judged) -> float:
    """What could not be measured (NaN, a wrong shape) is worse than any margin."""
    return math.inf if verdict.margin is None else verdict.margin


def _each(verdicts: Sequence[Judged], direction: Direction) -> list[_Origin]:
    """Every failure of a direction; with isolation none is the consequence of another.

    Absence does propagate: only the first gradient that was not computed is listed, and the norm of
    the remaining gradients is not examined.
    """
    absent = (
        _absent(verdicts)
        or [_Origin(v, v.name, Grounds.ABSENT) for v in verdicts if v.verdict in _ABSENT][:1]
    )
    # A parameter that no rank has means a module that no rank has: its forward pass is missing.
    started = {Direction.START: Direction.FORWARD}
    return (
        [
            one
            for one in absent
            if started.get(one.verdict.direction, one.verdict.direction) is direction
        ]
        + [
            _Origin(v, owner(v.name) if v.microbatch < 0 else v.name, Grounds.ISOLATED)
            for v in _failures(verdicts)
            if v.verdict not in _ABSENT
            and v.direction is direction
            and v.kind is not Kind.COUNTED
            and not (v.kind is Kind.GRAD_NORM and absent)
        ]
        + (_counted(verdicts) if direction is Direction.GRADIENT and not absent else [])
    )


def _start(verdicts: Sequence[Judged]) -> list[_Origin]:
    return [
        _Origin(verdict, verdict.name, Grounds.START)
        for verdict in _failures(verdicts, Kind.TOKENS, Kind.PARAM)
        if verdict.verdict not in _ABSENT and verdict.direction is Direction.START
    ] or [
        _Origin(verdict, f"{ROOT}.{verdict.index}", Grounds.MODEL_INPUT)
        for verdict in _failures(verdicts, Kind.INPUT)
        if verdict.name == ROOT and verdict.verdict not in _ABSENT
    ]


def _absent(verdicts: Sequence[Judged]) -> list[_Origin]:
    """Absent modules: by their parameters, or by their activations if no parameter is absent.

    Where all parameters of a module are absent, it is named, and not each module in it.
    A gradient that is absent was not computed: that belongs to its own stage.
    """
    absent = [
        verdict
        for verdict in verdicts
        if verdict.verdict in _ABSENT and verdict.direction in (Direction.START, Direction.FORWARD)
    ]
    started = [v for v in verdicts if v.kind is Kind.PARAM and v.direction is Direction.START]
    held: dict[Outcome, Counter[str]] = defaultdict(Counter)
    for v in started:
        held[v.verdict].update(_containers(v.name))
    every = sum(held.values(), Counter())
    found = []
    for v in (v for v in absent if v.kind is Kind.PARAM):
        alike = held[v.verdict]
        whole = [one for one in _containers(v.name) if alike[one] == every[one]]
        module, grounds = owner(v.name), Grounds.ABSENT
        if v.verdict is not Outcome.UNCOVERED and whole and every[whole[0]] > every[module]:
            # The innermost of those that have all these parameters.
            module = max(whole, key=lambda one: (every[one], len(one)))
            grounds = Grounds.ABSENT_MODULE
        found.append(_Origin(v, module, grounds))
    return found or [_Origin(v, v.name, Grounds.ABSENT) for v in absent]


def _containers(name: str) -> Iterator[str]:
    """The modules that contain a parameter or module, from the outermost; lists are none."""
    words = name.split(".")
    return (
        ".".join(words[:number]) for number in range(1, len(words)) if not words[number].isdigit()
    )


def _forward(verdicts: Sequence[Judged]) -> list[_Origin]:
    born = _born(
        verdicts,
        inputs=Kind.INPUT,
        outputs=(Kind.OUTPUT, Kind.ROUTING),
        grounds=Grounds.OUTPUT,
        without_inputs=Grounds.OUTPUT_WITHOUT_INPUTS,
    )
    # The whole model is named only if no part of it can be.
    parts = [found for found in born if found.module != ROOT]
    return parts or _first(verdicts, Kind.INPUT, Grounds.BETWEEN_MODULES) or born


def _loss(verdicts: Sequence[Judged]) -> list[_Origin]:
    return _first(verdicts, Kind.LOSS, Grounds.LOSS)


def _backward(verdicts: Sequence[Judged]) -> list[_Origin]:
    for v in verdicts:
        if v.verdict in _ABSENT and v.direction is Direction.BACKWARD:
            return [_Origin(v, v.name, Grounds.FIRST_ABSENT_GRADIENT)]
    born = _born(
        verdicts,
        inputs=Kind.GRAD_OUTPUT,
        outputs=(Kind.GRAD_INPUT,),
        grounds=Grounds.GRAD_INPUT,
        without_inputs=Grounds.GRAD_INPUT_WITHOUT_GRAD_OUTPUTS,
    )
    return (
        _with_wrong_weights(born, verdicts)
        or _within(verdicts)
        or _first(verdicts, Kind.GRAD_OUTPUT, Grounds.FIRST_GRADIENT)
    )


def _within(verdicts: Sequence[Judged]) -> list[_Origin]:
    """Modules whose output gradients pass, with the first that fails of each inside them.

    What makes the gradient of an output is the code that uses it: that of a module around it.
    """
    leaving: dict[tuple[int, str], float] = {}
    for v in verdicts:
        if v.kind is Kind.GRAD_OUTPUT:
            place = v.microbatch, v.name
            leaving[place] = max(leaving.get(place, 0.0), _severity(v))
    wrong = _failures(verdicts, Kind.GRAD_OUTPUT)
    failed = {(v.microbatch, v.name) for v in wrong}
    found: dict[tuple[int, str], _Origin] = {}
    for v in wrong:
        places = [(v.microbatch, one) for one in _containers(v.name)]
        around = [one for one in places if one in leaving][-1:]
        if not failed.isdisjoint(around) or not around:
            if not found:
                return []
        # Of the later ones, those in which no earlier error surfaces again.
        elif not found or _severity(v) >= _SURFACING * leaving[around[0]]:
            found.setdefault(around[0], _Origin(v, around[0][1], Grounds.WITHIN))
    return list(found.values())


def _with_wrong_weights(origins: list[_Origin], verdicts: Sequence[Judged]) -> list[_Origin]:
    """Without those that only share the tensor of another one.

    Modules with the same input have the same gradient there, the sum of what they all add. It is
    wrong through one whose weights' gradients are wrong, if the others' are right.
    """
    wrong = {owner(verdict.name) for verdict in _failures(verdicts, Kind.MAIN_GRAD)}
    sharing: dict[tuple[int, float], list[_Origin]] = {}
    for one in origins:
        error = one.verdict.rel_err
        # All tensors of zeros have the error 1, and all that are missing have none.
        if error is not None and math.isfinite(error) and error != 1.0:
            sharing.setdefault((one.verdict.microbatch, error), []).append(one)
    innocent = {
        id(one)
        for alike in sharing.values()
        if any(one.module in wrong for one in alike)
        for one in alike
        if one.module not in wrong
    }
    return [one for one in origins if id(one) not in innocent]


def _gradient(verdicts: Sequence[Judged]) -> list[_Origin]:
    wrong = _failures(verdicts, Kind.MAIN_GRAD)
    reduced = [one for one in _counted(verdicts) if one.verdict.index == _REDUCED]
    # Values do not change which elements an optimizer has; where it has wrong ones, it reads
    # gradients that this rank did not reduce.
    read = {v.name for v in wrong if v.verdict not in _ABSENT}
    counted = [v for v in _failures(verdicts, Kind.COUNTED) if v.index in (_REDUCED, _STEPPED)]
    stepped = [
        _Origin(v, owner(v.name), Grounds.STEPPED)
        for v in counted
        if v.index == _STEPPED and v.name in read
    ]
    known = {v.name for v in counted if v.index == _REDUCED}.union(
        one.verdict.name for one in stepped
    )
    found = (
        reduced
        + stepped
        + [_Origin(v, owner(v.name), Grounds.MAIN_GRAD) for v in wrong if v.name not in known]
    )
    if found and all(one.verdict.verdict in _ABSENT for one in found):
        # No optimizer has these: what each one steps says which elements, and why.
        return _counted(verdicts) or found
    if found or any(v.verdict in _ABSENT for v in _failures(verdicts, *MOMENTS)):
        # The norm is taken over what the optimizer knows: what it does not know is the finding.
        return found
    return _counted(verdicts) or _first(verdicts, Kind.GRAD_NORM, Grounds.GRAD_NORM)


def _counted(verdicts: Sequence[Judged]) -> list[_Origin]:
    """The first parameter of each statistic that has elements twice, or not at all."""
    first: dict[object, Judged] = {}
    for verdict in _failures(verdicts, Kind.COUNTED):
        first.setdefault((verdict.index, verdict.reason), verdict)
    return [
        _Origin(v, v.name, Grounds.REDUCED if v.index == _REDUCED else Grounds.COUNTED)
        for v in first.values()
    ]


def _update(verdicts: Sequence[Judged]) -> list[_Origin]:
    unknown = {v.name for v in _failures(verdicts, *MOMENTS) if v.verdict in _ABSENT}
    never = [
        _Origin(v, owner(v.name), Grounds.NO_OPTIMIZER_STATE)
        for v in _failures(verdicts, Kind.PARAM_DELTA)
        if v.name in unknown
    ]
    first: dict[str, Judged] = {}
    for verdict in sorted(_failures(verdicts, *_UPDATED), key=lambda v: _UPDATED.index(v.kind)):
        first.setdefault(verdict.name, verdict)
    # Without their gradients the norm is wrong, and with it every clipped update.
    return (
        never
        or [
            _Origin(v, owner(v.name), _SPECIAL.get((v.kind, v.index), Grounds.UPDATE))
            for v in verdicts
            if v is first.get(v.name)
        ]
        or [
            _Origin(v, v.name, _SPECIAL.get((v.kind, v.index), Grounds.METRIC))
            for v in _failures(verdicts, Kind.METRIC)
        ]
    )


def _born(
    verdicts: Sequence[Judged],
    *,
    inputs: Kind,
    outputs: tuple[Kind, ...],
    grounds: Grounds,
    without_inputs: Grounds,
) -> list[_Origin]:
    """Modules whose ``inputs`` all pass, with a failing output, and no such module inside."""
    wrong = {(v.microbatch, v.name) for v in _failures(verdicts, inputs)}
    born = [v for v in _failures(verdicts, *outputs) if (v.microbatch, v.name) not in wrong]
    names = {v.name for v in born}
    innermost = [
        v for v in born if not any(other != v.name and _inside(other, v.name) for other in names)
    ]
    entering: dict[tuple[int, str], float] = {}
    for v in verdicts:
        if v.kind is inputs:
            place = (v.microbatch, v.name)
            entering[place] = max(entering.get(place, 0.0), _severity(v))
    found = []
    for number, v in enumerate(innermost):
        if _is_new(v, innermost[:number], entering.get((v.microbatch, v.name), 0.0)):
            known = (v.microbatch, v.name) in entering
            jump = _largest_jump(v, _failures(verdicts, *outputs), entering)
            found.append(jump or _Origin(v, v.name, grounds if known else without_inputs))
    return found


def _largest_jump(
    container: Judged, failed: Sequence[Judged], entering: Mapping[tuple[int, str], float]
) -> _Origin | None:
    """A module inside, whose inputs fail a little and whose output by many times more.

    It must also be many times further off than the container, whose inputs pass.
    """
    jumps = [
        (_severity(one) / max(1.0, entering[one.microbatch, one.name]), one)
        for one in failed
        if one.microbatch == container.microbatch
        and one.name != container.name
        and _inside(one.name, container.name)
        and (one.microbatch, one.name) in entering
        and _severity(one) >= _SURFACING * _severity(container)
    ]
    size, largest = max(jumps, key=lambda one: one[0], default=(0.0, container))
    return _Origin(largest, largest.name, Grounds.JUMP) if size >= _SURFACING else None


def _is_new(verdict: Judged, earlier: Sequence[Judged], entering: float) -> bool:
    """Whether an error starts here, and is not an earlier one that surfaces again.

    An error may fall below the tolerance on its way (in a softmax, a norm) and exceed it again
    later. The module where it does so has inputs that pass, but are nearly as far off as its
    output.
    """
    if not any(other.microbatch == verdict.microbatch for other in earlier):
        return True
    return _severity(verdict) >= _SURFACING * entering


def _inside(module: str, container: str) -> bool:
    """Whether a module is within another; everything is within the model.

    A module that runs again in a microbatch has a number (``name#1``), which is not a place.
    """
    inner, outer = module.partition("#")[0], container.partition("#")[0]
    return outer == ROOT or inner.startswith(f"{outer}.")


def _first(verdicts: Sequence[Judged], kind: Kind, grounds: Grounds) -> list[_Origin]:
    """The first failure of a kind, if no module can be blamed for it."""
    return [_Origin(v, v.name, grounds) for v in _failures(verdicts, kind)[:1]]


_STAGES = (
    (Direction.START, _start),
    (Direction.FORWARD, _absent),
    (Direction.FORWARD, _forward),
    (Direction.FORWARD, _loss),
    (Direction.BACKWARD, _backward),
    (Direction.GRADIENT, _gradient),
    (Direction.UPDATE, _update),
)
