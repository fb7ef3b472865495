# SPDX-License-Identifier: Apache-2.0
"""From verdicts to culprits: the modules whose inputs pass and whose result does not.

A step is a chain of cause and effect (docs/explanations.md): culprits are looked for stage by
stage, and the first stage that has any is the answer. Megatron's own initial values, which nothing
of the traced step comes from, are examined separately.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_ttrace.diagnose.by_purpose import SCHEDULED
from megatron_ttrace.diagnose.groups import Groups, group_of
from megatron_ttrace.diagnose.origins import (
    ABSENT,
    At,
    Origin,
    absent_origins,
    of_module,
    owner,
    places_around,
    where_gradients_end,
)
from megatron_ttrace.diagnose.start import loaded
from megatron_ttrace.trace.counted import HyperparametersIndex, Statistic
from megatron_ttrace.trace.findings import Explanation, Note, Remark
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.modules import is_within, module_of
from megatron_ttrace.trace.outcomes import Grounds
from megatron_ttrace.trace.records import (
    MOMENTS,
    ROOT,
    STEP_LEVEL,
    BufferIndex,
    Direction,
    Kind,
    MetricIndex,
    Outcome,
    RoutingIndex,
)

Explain = Callable[[Judged], Explanation]

_SURFACING = 5.0
"""Growth of an error within one module that rounding does not explain."""

_FEW = 0.5
"""Share of the updates."""
_REDUCED, _STEPPED = Statistic.REDUCED.number, Statistic.STEPPED.number
_SPECIAL: dict[tuple[Kind, int], Grounds] = {
    (Kind.METRIC, MetricIndex.LEFT): Grounds.LEFT_OVER,
    (Kind.BUFFER, BufferIndex.LOADS): Grounds.LEFT_OVER,
    (Kind.BUFFER, BufferIndex.AFTER): Grounds.BUFFER,
}
_OF_KIND = {Kind.DROPOUT: Grounds.MASK, Kind.PRECISION: Grounds.PRECISION}
_NO_GRADIENT = {Outcome.MISSING: Grounds.NO_MAIN_GRAD}
_RATE = "learning-rate"  # the metric that the schedule set
_UPDATED = (Kind.HYPERPARAMETERS, *MOMENTS, Kind.PARAM_DELTA, Kind.PARAM, Kind.BUFFER)
"""In the order in which an optimizer's step computes them."""


def localise(
    verdicts: Sequence[Judged],
    explain: Explain = lambda verdict: Explanation(),
    *,
    isolated: bool = False,
) -> list[Diagnosis]:
    """Find the culprits of a run.

    Where it was ``isolated``, every tensor was computed from the reference's: no failure is the
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
    drawn = [v for v in _failures(verdicts, Kind.INITIAL) if v.name not in claimed]
    initial = _of_owners(drawn, Grounds.INITIAL)
    initial += [Origin(v, owner(v.name), grounds) for v, grounds in loaded(verdicts)]
    failed = _failures(steps)
    first = min((verdict.iteration for verdict in failed), default=0)
    now = [verdict for verdict in steps if verdict.iteration == first]
    stages = [(Direction.START, initial)]
    if isolated:
        stages += [(direction, _isolated(now, direction)) for direction in Direction]
    elif failed:
        unexplained = failed[0].kind.direction, _of_modules(failed[:1], Grounds.FIRST_FAILURE)
        failing = ((direction, origins(now)) for direction, origins in _STAGES)
        stages.append(next((stage for stage in failing if stage[1]), unexplained))
    groups: Groups = {}
    return [
        culprit
        for direction, origins in stages
        for culprit in _one_per_module(origins, direction, explain, steps, groups)
    ]


def _failures(verdicts: Iterable[Judged], *kinds: Kind) -> list[Judged]:
    """Those that fail, of these kinds or of all."""
    return [v for v in verdicts if v.verdict.is_failure and (not kinds or v.kind in kinds)]


def _of_modules(verdicts: Iterable[Judged], grounds: Grounds) -> list[Origin]:
    return [Origin(v, v.name, grounds) for v in verdicts]


def _of_owners(parameters: Iterable[Judged], grounds: Grounds) -> list[Origin]:
    return [Origin(v, owner(v.name), grounds) for v in parameters]


def _one_per_module(
    origins: Iterable[Origin],
    direction: Direction,
    explain: Explain,
    verdicts: Sequence[Judged],
    groups: Groups,
) -> list[Diagnosis]:
    chosen: dict[str, Origin] = {}
    for origin in origins:
        worst = chosen.setdefault(origin.module, origin)
        if _severity(origin.verdict) > _severity(worst.verdict):
            chosen[origin.module] = origin
    culprits = []
    for (verdict, module, grounds), *shared in _of_one_tensor([*chosen.values()], verdicts):
        why = explain(verdict)
        before, alike = _around(verdict, verdicts)
        culprits.append(
            Diagnosis(
                name=f"{ROOT}.{why.argument}" if why.argument else module,
                direction=direction,
                grounds=grounds,
                verdict=verdict,
                before=None if Note(Remark.RECOMPUTED) in verdict.notes else before,
                alike=alike,
                shared=tuple(other.module for other in shared),
                why=why,
                group=group_of(groups, direction, verdict, grounds, why.finding),
            )
        )
    return culprits


def _of_one_tensor(origins: list[Origin], verdicts: Sequence[Judged]) -> list[list[Origin]]:
    """Origins that share a tensor: modules with the same input have the same gradient there.

    The first has modules inside, around which it has code of its own. Where the gradients of a
    module's weights are wrong, it is an origin of its own.
    """
    wrong = {owner(verdict.name) for verdict in _failures(verdicts, Kind.MAIN_GRAD)}
    outer = {v.name.rpartition(".")[0] for v in verdicts if v.kind is Kind.GRAD_INPUT}
    sharing: dict[object, list[Origin]] = defaultdict(list)
    for origin in sorted(origins, key=lambda origin: origin.module not in outer):
        v = origin.verdict
        error = None if module_of(v.name) in wrong else _own_error(v)
        others = sharing[(v.microbatch, error, v.ranks) if error else id(origin)]
        is_nested = any(is_within(origin.module, o.module) for o in others)
        (sharing[id(origin)] if is_nested else others).append(origin)
    return sorted(sharing.values(), key=lambda shared: min(map(origins.index, shared)))


def _own_error(v: Judged) -> float | None:
    """The error of the gradient of an input, by which this is known; ``None`` for any other tensor.

    All tensors of zeros have the error 1, and all that are missing have none.
    """
    return v.rel_err if v.kind is Kind.GRAD_INPUT and v.rel_err != 1.0 else None


def _around(
    verdict: Judged, verdicts: Sequence[Judged]
) -> tuple[Judged | None, tuple[Judged, ...]]:
    """The tensor before this one, if it passes; for one of the whole step, all of its kind."""
    if verdict.verdict in ABSENT or verdict.direction is Direction.START:
        return None, ()
    verdicts = [v for v in verdicts if v.iteration == verdict.iteration]
    if verdict.microbatch == STEP_LEVEL:
        kind = verdict.kind, verdict.index
        return None, tuple(v for v in verdicts if (v.kind, v.index) == kind)
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


def _isolated(verdicts: Sequence[Judged], direction: Direction) -> list[Origin]:
    """Every failure of a direction; with isolation none is the consequence of another.

    Absence does propagate: only the first gradient that was not computed is listed, and the norm of
    the remaining gradients is not examined. Of a module in another precision only that is listed.
    """
    absent = absent_origins(verdicts)
    if not absent:
        absent = _of_modules([v for v in verdicts if v.verdict in ABSENT][:1], Grounds.ABSENT)
    otherwise_rounded = {v.name for v in _failures(verdicts, Kind.PRECISION)}
    # A parameter that no rank has means a module that no rank has: its forward pass is missing.
    started = {Direction.START: Direction.FORWARD}
    return (
        [o for o in absent if started.get(o.verdict.direction, o.verdict.direction) is direction]
        + _layers_of_routers(
            [
                Origin(v, of_module(v), _OF_KIND.get(v.kind, Grounds.ISOLATED))
                for v in _failures(verdicts)
                if v.verdict not in ABSENT
                and v.direction is direction
                and (v.kind is Kind.PRECISION or of_module(v) not in otherwise_rounded)
                and v.kind is not Kind.COUNTED
                and not (v.kind is Kind.GRAD_NORM and absent)
            ],
            verdicts,
        )
        + (_counted(verdicts) if direction is Direction.GRADIENT and not absent else [])
    )


def _start(verdicts: Sequence[Judged]) -> list[Origin]:
    present = [v for v in _failures(verdicts) if v.verdict not in ABSENT]
    started = [v for v in present if v.kind is Kind.TOKENS or v.key.is_before]
    inputs = [v for v in present if v.kind is Kind.INPUT and v.name == ROOT]
    return (
        _of_owners((v for v in started if Note(Remark.NOT_GATHERED) in v.notes), Grounds.USED)
        or _of_modules(started, Grounds.START)
        or [Origin(v, f"{ROOT}.{v.index}", Grounds.MODEL_INPUT) for v in inputs]
    )


def _forward(verdicts: Sequence[Judged]) -> list[Origin]:
    born = _born(
        verdicts,
        inputs=Kind.INPUT,
        outputs=(Kind.OUTPUT, Kind.PRECISION, Kind.ROUTING, Kind.DROPOUT),
        grounds=Grounds.OUTPUT,
        without_inputs=Grounds.OUTPUT_WITHOUT_INPUTS,
    )
    # The whole model is named only if no part of it can be.
    parts = [origin for origin in born if origin.module != ROOT]
    return parts or _first(verdicts, Kind.INPUT, Grounds.BETWEEN_MODULES) or born


def _backward(verdicts: Sequence[Judged]) -> list[Origin]:
    if absent := where_gradients_end(verdicts):
        return _of_modules(absent, Grounds.FIRST_ABSENT_GRADIENT)
    born = _born(
        verdicts,
        inputs=Kind.GRAD_OUTPUT,
        outputs=(Kind.GRAD_INPUT,),
        grounds=Grounds.GRAD_INPUT,
        without_inputs=Grounds.GRAD_INPUT_WITHOUT_GRAD_OUTPUTS,
    )
    return (
        _layers_of_routers(_with_wrong_weights(born, verdicts), verdicts)
        or _within(verdicts)
        or _first(verdicts, Kind.GRAD_OUTPUT, Grounds.FIRST_GRADIENT)
    )


def _within(verdicts: Sequence[Judged]) -> list[Origin]:
    """Modules whose output gradients pass, with the first that fails of each inside them.

    What makes the gradient of an output is the code that uses it: that of a module around it.
    """
    leaving = _worst(verdicts, Kind.GRAD_OUTPUT)
    wrong = _failures(verdicts, Kind.GRAD_OUTPUT)
    failed = {(v.microbatch, v.name) for v in wrong}
    origins: dict[At, Origin] = {}
    for v in wrong:
        around = [place for place in places_around(v) if place in leaving][-1:]
        if not failed.isdisjoint(around) or not around:
            if not origins:
                return []
        # Of the later ones, those in which no earlier error surfaces again: neither that of a
        # module inside, which leaves it as a gradient here, nor one below the tolerance.
        elif not any(
            at == v.microbatch and is_within(name, around[0][1]) for at, name in origins
        ) and (not origins or _severity(v) >= _SURFACING * leaving[around[0]]):
            origins[around[0]] = Origin(v, around[0][1], Grounds.WITHIN)
    return list(origins.values())


def _worst(verdicts: Iterable[Judged], kind: Kind) -> dict[At, float]:
    """How far off the worst tensor of a kind is, at each module of each microbatch."""
    worst: dict[At, float] = defaultdict(float)
    for v in verdicts:
        if v.kind is kind:
            worst[v.microbatch, v.name] = max(worst[v.microbatch, v.name], _severity(v))
    return dict(worst)


def _with_wrong_weights(origins: list[Origin], verdicts: Sequence[Judged]) -> list[Origin]:
    """Without those that only share the tensor of another module, which need not be an origin.

    Modules with the same input have the same gradient there, the sum of what they all add. It is
    wrong through one whose weights' gradients are wrong, if the others' are right.
    """
    wrong = {owner(verdict.name) for verdict in _failures(verdicts, Kind.MAIN_GRAD)}
    guilty: dict[tuple[int, float], set[str]] = defaultdict(set)
    for v in _failures(verdicts, Kind.GRAD_INPUT):
        if module_of(v.name) in wrong and (error := _own_error(v)) is not None:
            guilty[v.microbatch, error].add(v.name)

    def is_innocent(origin: Origin) -> bool:
        error = origin.verdict.rel_err
        if module_of(origin.module) in wrong or error is None:
            return False
        others = guilty.get((origin.verdict.microbatch, error), ())
        return any(not is_within(other, origin.module) for other in others)

    return [origin for origin in origins if not is_innocent(origin)]


def _layers_of_routers(origins: list[Origin], verdicts: Sequence[Judged]) -> list[Origin]:
    """Origins, with the layer of experts in place of a router whose input's gradient alone fails.

    Router and experts have the same input, whose gradient is the sum of what all of them add. If
    the gradients of the router's weights pass, any part of the layer can be wrong. Those of the
    layers below may then fail as a consequence.
    """
    wrong = {owner(verdict.name) for verdict in _failures(verdicts, Kind.MAIN_GRAD)}
    chosen = Kind.ROUTING, RoutingIndex.CHOICE
    routers = {v.name for v in verdicts if (v.kind, v.index) == chosen}
    entering = {(v.microbatch, v.name, v.rel_err): v for v in _failures(verdicts, Kind.GRAD_INPUT)}
    found, is_layer = [*origins], False
    for number, (v, module, grounds) in enumerate(origins):
        layer = module.rpartition(".")[0]
        same = entering.get((v.microbatch, layer, v.rel_err))
        if v.name in routers and v.kind is Kind.GRAD_INPUT and same is not None:
            is_layer = is_layer or module_of(v.name) not in wrong
            found[number] = Origin(same, layer, grounds) if is_layer else found[number]
    return found


def _gradient(verdicts: Sequence[Judged]) -> list[Origin]:
    wrong = _failures(verdicts, Kind.MAIN_GRAD)
    # Values do not change which elements an optimizer has; where it has wrong ones, it reads
    # gradients that this rank did not reduce.
    read = {v.name for v in wrong if v.verdict not in ABSENT}
    counted = _failures(verdicts, Kind.COUNTED)
    stepped = [v for v in counted if v.index == _STEPPED and v.name in read]
    reduced = (v for v in counted if v.index == _REDUCED)
    explained = {v.name for v in (*stepped, *reduced)}
    origins = (
        [origin for origin in _counted(verdicts) if origin.verdict.index == _REDUCED]
        + _of_owners(stepped, Grounds.STEPPED)
        + [
            Origin(v, owner(v.name), _NO_GRADIENT.get(v.verdict, Grounds.MAIN_GRAD))
            for v in wrong
            if v.name not in explained
        ]
    )
    if origins and all(origin.verdict.verdict in ABSENT for origin in origins):
        # No optimizer has these: what each one steps shows which elements, and why.
        return _counted(verdicts) or origins
    if origins or any(v.verdict in ABSENT for v in _failures(verdicts, *MOMENTS)):
        # The norm is taken over what the optimizer knows: what it does not know is the finding.
        return origins
    counted_wrongly = _counted(verdicts)
    failing = Counter(v.kind for v in _failures(verdicts, *MOMENTS, Kind.PARAM_DELTA))
    total = Counter(v.kind for v in verdicts)
    few = failing and all(count < _FEW * total[kind] for kind, count in failing.items())
    if few and not counted_wrongly:
        # A wrong norm scales all updates. What makes few of them wrong makes the norm wrong, too.
        return []
    return counted_wrongly or _first(verdicts, Kind.GRAD_NORM, Grounds.GRAD_NORM)


def _counted(verdicts: Sequence[Judged]) -> list[Origin]:
    """The first parameter of each statistic that has elements twice, or not at all."""
    first: dict[object, Judged] = {}
    for verdict in _failures(verdicts, Kind.COUNTED):
        first.setdefault((verdict.index, verdict.reason), verdict)
    return [
        Origin(v, v.name, Grounds.REDUCED if v.index == _REDUCED else Grounds.COUNTED)
        for v in first.values()
    ]


def _update(verdicts: Sequence[Judged]) -> list[Origin]:
    unknown = {v.name for v in _failures(verdicts, *MOMENTS) if v.verdict in ABSENT}
    never = [v for v in _failures(verdicts, Kind.PARAM_DELTA) if v.name in unknown]
    first: dict[str, Judged] = {}
    following = Kind.HYPERPARAMETERS, HyperparametersIndex.NEXT
    failed = [v for v in _failures(verdicts, *_UPDATED) if (v.kind, v.index) != following]
    if any(v.kind is Kind.BUFFER and v.verdict not in ABSENT for v in failed):
        # No load is known where some biases are not updated: their values tell which.
        loads = (Kind.BUFFER, BufferIndex.LOADS)
        failed = [v for v in failed if v.verdict not in ABSENT or (v.kind, v.index) != loads]
    for v in sorted(failed, key=lambda v: _UPDATED.index(v.kind)):
        first.setdefault(v.name, v)
    # Without their gradients the norm is wrong, and with it every clipped update.
    return (
        _of_owners(never, Grounds.NO_OPTIMIZER_STATE)
        or [
            Origin(v, owner(v.name), _SPECIAL.get((v.kind, v.index), Grounds.UPDATE))
            for v in verdicts
            if v is first.get(v.name)
        ]
        or _left(verdicts)
    )


def _left(verdicts: Sequence[Judged]) -> list[Origin]:
    """Failing numbers that a step logs or leaves, where all that it computes passes.

    What is scheduled follows from the number of samples.
    """
    scheduled = _of_owners(_failures(verdicts, Kind.HYPERPARAMETERS), Grounds.LEFT_OVER)
    logged = [
        Origin(v, v.name, _SPECIAL.get((v.kind, v.index), Grounds.METRIC))
        for v in _failures(verdicts, Kind.METRIC)
    ]
    if any(origin.module == SCHEDULED for origin in logged):
        scheduled = []
    elif not scheduled:
        return logged
    return scheduled + [origin for origin in logged if origin.module != _RATE]


def _born(
    verdicts: Sequence[Judged],
    *,
    inputs: Kind,
    outputs: tuple[Kind, ...],
    grounds: Grounds,
    without_inputs: Grounds,
) -> list[Origin]:
    """Modules whose ``inputs`` all pass, with a failing output, and no such module inside."""
    wrong = {(v.microbatch, v.name) for v in _failures(verdicts, inputs)}
    born = [v for v in _failures(verdicts, *outputs) if (v.microbatch, v.name) not in wrong]
    names = {v.name for v in born}
    innermost = [v for v in born if not any(_is_inside(other, v.name) for other in names)]
    entering = _worst(verdicts, inputs)
    origins = []
    first = {v.microbatch: v for v in reversed(_failures(verdicts, inputs, *outputs))}
    for v in innermost:
        place = v.microbatch, v.name
        # An error may fall below the tolerance on its way (in a softmax, a norm) and exceed it
        # again later. The module where it does so has inputs that pass, but are nearly as far off
        # as its output.
        begins = is_within(first[v.microbatch].name, v.name)
        if begins or _severity(v) >= _SURFACING * entering.get(place, 0.0):
            jump = _largest_jump(v, _failures(verdicts, *outputs), entering)
            where = _OF_KIND.get(v.kind, grounds if place in entering else without_inputs)
            origins.append(jump or Origin(v, v.name, where))
    return origins


def _is_inside(name: str, module: str) -> bool:
    """Whether a module is inside another one; another run of the same module is not."""
    return module_of(name) != module_of(module) and is_within(name, module)


def _largest_jump(
    container: Judged, failed: Sequence[Judged], entering: Mapping[At, float]
) -> Origin | None:
    """A module inside, whose inputs fail a little and whose output by many times more.

    It must also be many times further off than the container, whose inputs pass.
    """
    jumps = [
        (_severity(v) / max(1.0, entering[v.microbatch, v.name]), v)
        for v in failed
        if v.microbatch == container.microbatch
        and _is_inside(v.name, container.name)
        and (v.microbatch, v.name) in entering
        and _severity(v) >= _SURFACING * _severity(container)
    ]
    size, largest = max(jumps, key=lambda jump: jump[0], default=(0.0, container))
    return Origin(largest, largest.name, Grounds.JUMP) if size >= _SURFACING else None


def _first(verdicts: Sequence[Judged], kind: Kind, grounds: Grounds) -> list[Origin]:
    """The first failure of a kind, if no module can be blamed for it."""
    return _of_modules(_failures(verdicts, kind)[:1], grounds)


_STAGES = (
    (Direction.START, _start),
    (Direction.FORWARD, absent_origins),
    (Direction.FORWARD, _forward),
    (Direction.FORWARD, functools.partial(_first, kind=Kind.LOSS, grounds=Grounds.LOSS)),
    (Direction.BACKWARD, _backward),
    (Direction.GRADIENT, _gradient),
    (Direction.UPDATE, _update),
)
