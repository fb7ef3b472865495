# SPDX-License-Identifier: Apache-2.0
"""From verdicts to culprits: the modules whose inputs pass and whose result does not.

A step is a chain of cause and effect: start values, forward, loss, backward, gradients, update. A
failure in one stage makes everything after it differ, so culprits are looked for stage by stage and
the first stage that has any is the answer.

Megatron's own initial values, which nothing of the traced step comes from, are looked at apart.

- start: a parameter or a token differs before anything was computed;
- missing: a module or parameter of the reference exists nowhere in the candidate;
- forward: all of a module's inputs pass, an output fails, and no module inside it explains that;
- backward: all of its output gradients pass, an input gradient fails;
- gradient: activations and activation gradients pass, a main gradient fails;
- update: main gradients pass, the change of a parameter or a moment fails.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from megatron_ttrace.mcore.names import ROOT
from megatron_ttrace.trace.findings import Explanation
from megatron_ttrace.trace.records import STEP_LEVEL, Culprit, Direction, Kind, Outcome, Verdict

Explain = Callable[[Verdict], Explanation]

_SURFACING = 5.0
"""Growth of an error within one module that rounding does not explain."""

_ABSENT = (Outcome.MISSING, Outcome.EXTRA, Outcome.UNCOVERED)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stage:
    direction: Direction
    culprits: Callable[[Sequence[Verdict]], list[tuple[Verdict, str, str]]]


def localise(
    verdicts: Sequence[Verdict], explain: Explain | None = None, *, isolated: bool = False
) -> list[Culprit]:
    """Find the culprits of a run.

    Args:
        verdicts: of all tensors, in the reference's execution order.
        explain: turns a failed verdict into a tested hypothesis about the cause.
        isolated: whether every tensor was computed from the reference's. Then no failure is the
            consequence of another one, and each stands for itself.

    Returns:
        Culprits of the earliest failing stage (of all stages, when isolated) of the earliest
        failing iteration, in execution order; one per module, standing for its worst tensor. Empty
        when nothing failed.
    """
    # The traced step starts from other values: nothing in it is a consequence of initial ones.
    initial = [
        (verdict, owner(verdict.name), "it is wrong before anything was computed")
        for verdict in verdicts
        if verdict.verdict.is_failure and verdict.kind is Kind.INITIAL
    ]
    verdicts = [verdict for verdict in verdicts if verdict.kind is not Kind.INITIAL]
    return [
        *_one_per_module(initial, Direction.START, explain, verdicts),
        *_of_steps(verdicts, explain, isolated=isolated),
    ]


def _of_steps(
    verdicts: Sequence[Verdict], explain: Explain | None, *, isolated: bool
) -> list[Culprit]:
    failed = [verdict for verdict in verdicts if verdict.verdict.is_failure]
    if not failed:
        return []
    first = min(verdict.iteration for verdict in failed)
    now = [verdict for verdict in verdicts if verdict.iteration == first]
    if isolated:
        return [
            culprit
            for direction in Direction
            for culprit in _one_per_module(_each(now, direction), direction, explain, now)
        ]
    for stage in _STAGES:
        found = stage.culprits(now)
        if found:
            return _one_per_module(found, stage.direction, explain, now)
    return _one_per_module(
        [(failed[0], failed[0].name, "first failure in execution order; no module explains it")],
        failed[0].kind.direction,
        explain,
        now,
    )


def _each(verdicts: Sequence[Verdict], direction: Direction) -> list[tuple[Verdict, str, str]]:
    """Every failure of a direction, where none is the consequence of another.

    That a tensor is absent does spread: the first gradient that nobody computed stands for all, and
    the norm of what is left is not the norm of all.
    """
    reason = "computed from the reference's own tensors, it differs"
    absent = (
        _absent(verdicts)
        or [
            (verdict, verdict.name, verdict.note)
            for verdict in verdicts
            if verdict.verdict in _ABSENT
        ][:1]
    )
    return [found for found in absent if _absent_in(found[0]) is direction] + [
        (verdict, owner(verdict.name) if verdict.microbatch < 0 else verdict.name, reason)
        for verdict in verdicts
        if verdict.verdict.is_failure
        and verdict.verdict not in _ABSENT
        and verdict.direction is direction
        and not (verdict.kind is Kind.GRAD_NORM and absent)
    ]


def _absent_in(verdict: Verdict) -> Direction:
    """A parameter that no rank has is a module that no rank has: there is no forward of it."""
    start = verdict.direction is Direction.START
    return Direction.FORWARD if start else verdict.direction


def _one_per_module(
    found: Iterable[tuple[Verdict, str, str]],
    direction: Direction,
    explain: Explain | None,
    verdicts: Sequence[Verdict],
) -> list[Culprit]:
    chosen: dict[str, tuple[Verdict, str]] = {}
    for verdict, module, reason in found:
        known = chosen.get(module)
        if known is None or _severity(verdict) > _severity(known[0]):
            chosen[module] = verdict, reason
    culprits = []
    for module, (verdict, reason) in chosen.items():
        why = explain(verdict) if explain else Explanation()
        culprits.append(
            Culprit(
                name=module,
                kind=verdict.kind,
                direction=direction,
                reason=reason + _chain(verdict, verdicts),
                explanation=why.text,
                iteration=verdict.iteration,
                microbatch=verdict.microbatch,
                index=verdict.index,
                verdict=verdict.verdict,
                ranks=verdict.ranks,
                rel_err=verdict.rel_err,
                rel_err_eps=verdict.rel_err_eps,
                tolerance=verdict.tolerance,
                margin=verdict.margin,
                hint=why.hint,
                where=why.where,
                cause=why.cause,
                axes=why.axes,
            )
        )
    return culprits


def _chain(verdict: Verdict, verdicts: Sequence[Verdict]) -> str:
    """The evidence around a culprit: what passed just before it, how many of its kind fail."""
    if verdict.verdict in _ABSENT or verdict.direction is Direction.START:
        return ""
    if verdict.microbatch == STEP_LEVEL:
        alike = [v for v in verdicts if v.kind is verdict.kind and v.index == verdict.index]
        failing = sum(v.verdict.is_failure for v in alike)
        return f"; {failing} of {len(alike)} of its kind fail" if len(alike) > 1 else ""
    before = None
    for other in verdicts:
        if other.key == verdict.key:
            break
        if other.microbatch == verdict.microbatch and other.kind is not Kind.TOKENS:
            before = other if other.verdict is Outcome.PASS else None
    if before is None:
        return ""
    return f"; just before it {before.name} {before.kind}.{before.index} passes"


def _severity(verdict: Verdict) -> float:
    """What could not be measured (NaN, a wrong shape) is worse than any margin."""
    return math.inf if verdict.margin is None else verdict.margin


def _start(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, str, str]]:
    return [
        (verdict, verdict.name, "differs before anything was computed")
        for verdict in verdicts
        if verdict.verdict.is_failure
        and verdict.verdict not in _ABSENT
        and (verdict.kind is Kind.TOKENS or (verdict.kind is Kind.PARAM and verdict.index == 0))
    ]


def _absent(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, str, str]]:
    """Parameters say most plainly that a module is absent; activations only where none is.

    A gradient that is absent was not computed: that belongs to its own stage.
    """
    absent = [
        verdict
        for verdict in verdicts
        if verdict.verdict in _ABSENT and verdict.direction in (Direction.START, Direction.FORWARD)
    ]
    parameters = [v for v in absent if v.kind is Kind.PARAM and v.index == 0]
    return [(v, owner(v.name) if v in parameters else v.name, v.note) for v in parameters or absent]


def owner(parameter: str) -> str:
    """The module that a parameter belongs to."""
    return parameter.rpartition(".")[0] or parameter


def _forward(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, str, str]]:
    born = _born(
        verdicts,
        inputs=Kind.INPUT,
        outputs=(Kind.OUTPUT, Kind.ROUTING),
        reason="all its inputs pass, its output does not",
        first="it has no inputs of its own to blame",
    )
    # The model's inputs are the tokens: it says only what is left when nobody else can be blamed.
    parts = [found for found in born if found[1] != ROOT]
    between = "this input fails although all outputs before it pass"
    return parts or _unexplained(verdicts, (Kind.INPUT,), between) or born


def _loss(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, str, str]]:
    return _unexplained(
        verdicts, (Kind.LOSS,), "every module's output passes, the reported loss does not"
    )


def _backward(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, str, str]]:
    absent = [v for v in verdicts if v.verdict in _ABSENT and v.direction is Direction.BACKWARD]
    if absent:
        note = "forward passes, and this is the first gradient that nobody computed"
        return [(absent[0], absent[0].name, note)]
    return _born(
        verdicts,
        inputs=Kind.GRAD_OUTPUT,
        outputs=(Kind.GRAD_INPUT,),
        reason="forward passes and so do its output gradients, its input gradient does not",
        first="the backward pass starts here",
    ) or _unexplained(
        verdicts,
        (Kind.GRAD_OUTPUT,),
        "forward passes, and this is the first gradient of the backward pass that fails",
    )


def _gradient(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, str, str]]:
    reason = "activations and their gradients pass, the reduced gradient of {} does not"
    found = [
        (verdict, owner(verdict.name), reason.format(verdict.name))
        for verdict in verdicts
        if verdict.verdict.is_failure and verdict.kind is Kind.MAIN_GRAD
    ]
    unstepped = any(
        v.verdict in _ABSENT and v.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ) for v in verdicts
    )
    if found or unstepped:
        # The norm is taken over what the optimizer knows: what it does not know is the finding.
        return found
    return _unexplained(
        verdicts, (Kind.GRAD_NORM,), "every main gradient passes, their norm does not"
    )


def _update(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, str, str]]:
    reason = "its main gradient passes, the optimizer's {} of {} does not"
    unknown = {
        v.name
        for v in verdicts
        if v.verdict in _ABSENT and v.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
    }
    never = [
        (v, owner(v.name), f"its main gradient passes, the optimizer keeps no state of {v.name}")
        for v in verdicts
        if v.kind is Kind.PARAM_DELTA and v.verdict.is_failure and v.name in unknown
    ]
    if never:
        # Without their gradients the norm is wrong, and with it every clipped update.
        return never
    kinds = (Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.PARAM, Kind.BUFFER)
    return [
        (verdict, owner(verdict.name), reason.format(verdict.kind, verdict.name))
        for verdict in verdicts
        if verdict.verdict.is_failure and verdict.kind in kinds
    ]


def _born(
    verdicts: Sequence[Verdict],
    *,
    inputs: Kind,
    outputs: tuple[Kind, ...],
    reason: str,
    first: str,
) -> list[tuple[Verdict, str, str]]:
    """Modules whose ``inputs`` all pass, with a failing output, and no such module inside."""
    sick_inputs = {
        (v.microbatch, v.name) for v in verdicts if v.kind is inputs and v.verdict.is_failure
    }
    with_inputs = {(v.microbatch, v.name) for v in verdicts if v.kind is inputs}
    born = [
        v
        for v in verdicts
        if v.kind in outputs and v.verdict.is_failure and (v.microbatch, v.name) not in sick_inputs
    ]
    names = {v.name for v in born}
    innermost = [
        v for v in born if not any(other != v.name and _inside(other, v.name) for other in names)
    ]
    entering: dict[tuple[int, str], float] = {}
    for v in verdicts:
        if v.kind is inputs:
            place = (v.microbatch, v.name)
            entering[place] = max(entering.get(place, 0.0), _severity(v))
    return [
        (v, v.name, reason if (v.microbatch, v.name) in with_inputs else first)
        for number, v in enumerate(innermost)
        if _is_new(v, innermost[:number], entering.get((v.microbatch, v.name), 0.0))
    ]


def _is_new(verdict: Verdict, earlier: Sequence[Verdict], entering: float) -> bool:
    """Whether an error is born here, and not an earlier one that surfaces again.

    An error may sink below the tolerance on its way (a softmax, a norm) and rise above it later:
    the module where it surfaces then has inputs that pass, but nearly as far off as its output.
    """
    if not any(other.microbatch == verdict.microbatch for other in earlier):
        return True
    return _severity(verdict) >= _SURFACING * entering


def _inside(module: str, container: str) -> bool:
    """Whether a module lies in another; everything lies in the model.

    A module that runs again in a microbatch gets a number then (``name#1``), not a place.
    """
    inner, outer = module.partition("#")[0], container.partition("#")[0]
    return outer == ROOT or inner.startswith(f"{outer}.")


def _unexplained(
    verdicts: Sequence[Verdict], kinds: tuple[Kind, ...], reason: str
) -> list[tuple[Verdict, str, str]]:
    """The first failure of these kinds, when no module can be blamed for it."""
    for verdict in verdicts:
        if verdict.kind in kinds and verdict.verdict.is_failure:
            return [(verdict, verdict.name, reason)]
    return []


_STAGES = (
    _Stage(Direction.START, _start),
    _Stage(Direction.FORWARD, _absent),
    _Stage(Direction.FORWARD, _forward),
    _Stage(Direction.FORWARD, _loss),
    _Stage(Direction.BACKWARD, _backward),
    _Stage(Direction.GRADIENT, _gradient),
    _Stage(Direction.UPDATE, _update),
)
