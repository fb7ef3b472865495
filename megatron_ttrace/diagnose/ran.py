# SPDX-License-Identifier: Apache-2.0
"""What the ledger of a traced step says about a culprit: its collectives, and its code.

Both are observed, not tested: they are hints, and no cause.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_ttrace.diagnose.start import WEIGHTS
from megatron_ttrace.mcore.sources import builder_place
from megatron_ttrace.placement.mesh import AXES
from megatron_ttrace.trace.collectives import (
    Citation,
    Collective,
    Ledger,
    ModuleCode,
    Operation,
    Phase,
    Sources,
    pattern,
)
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.executed import ChangedCode, ChangedFunction, Execution
from megatron_ttrace.trace.findings import FACTORS, Cause, Finding, LossShare
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import ROOT, Culprit, Direction, Kind, LoadedIndex

_PHASES = {
    Direction.FORWARD: Phase.FORWARD,
    Direction.BACKWARD: Phase.BACKWARD,
    Direction.GRADIENT: Phase.GRADIENTS,
}
_OF_OPTIMIZERS = (Statistic.CLIPPED.number, Statistic.STEPPED.number)
_CLIPPING = "clipping"
"""The size of a factor: the gradient norm over its limit (:func:`scaling.constant_factor`)."""
_LEAST_BYTES = 2
"""Of an element of a gradient that is reduced."""
_REDUCED = (Cause.PARTIAL, *FACTORS)
"""Causes that concern a reduction over the axes of the finding."""


def cite(verdict: Judged, finding: Finding | None, ledger: Ledger) -> Citation | None:
    """The collectives that ran in the module of a failed tensor, in its direction.

    ``None`` if none are recorded, the tensor comes from no module's computation, or the module may
    communicate unseen.
    """
    phase = _PHASES.get(verdict.direction)
    if phase is None or not ledger.recorded or not ledger.collectives:
        return None
    axes, step = _axes(finding), (ledger, verdict, phase)
    if phase not in (Phase.FORWARD, Phase.BACKWARD):
        ran = tuple(call for call in _of(*step) if set(axes) & _spans(call.group))
        return Citation(phase, ran, _without(axes, ran, ledger.unseen)) if axes else None
    module = verdict.name.partition("#")[0]
    ran = tuple(_inside(_of(*step), module))
    code = _runs(ledger.sources.of(module))
    siblings = [
        name
        for name in ledger.sources.modules
        if name != module
        and pattern(name) == pattern(module)
        and _runs(ledger.sources.of(name)) == code
    ]
    theirs = [
        dict.fromkeys((call.operation, call.group) for call in _inside(_of(*step), name))
        for name in siblings
    ]
    ours = {(call.operation, call.group) for call in ran}
    common = theirs[0] if theirs else ()
    lacking = tuple(c for c in common if c not in ours and all(c in each for each in theirs))
    if ledger.unseen and not ran and not lacking:
        return None
    return Citation(phase, ran, _without(axes, ran, ledger.unseen), lacking, len(siblings))


def where(verdict: Judged, finding: Finding | None, ledger: Ledger, *, alone: bool = True) -> str:
    """``file:line (function)``, where to look for the cause of a failure; empty if not known.

    The call of a collective that only the same module of other layers ran, or of the reduction that
    the finding is about; else the autograd function that made the tensor, or the code of its
    module, of the optimizer, or of the training script. What is wrong before the step was made by
    its module's constructor.

    Args:
        verdict: of the failed tensor.
        finding: what was found out about its cause.
        ledger: of the traced step.
        alone: whether no other tensor is known to have the same fault.
    """
    if place := builder_place(finding):
        return place
    kind, sources = verdict.kind, ledger.sources
    if (kind, verdict.name) == (Kind.INPUT, ROOT) or kind in (Kind.TOKENS, Kind.LOSS):
        return sources.step
    if kind is Kind.LOADED:
        if verdict.index == LoadedIndex.NUMBER:
            loaders = sources.loaders.items()
            return next((place for of, place in loaders if verdict.name.startswith(of)), "")
        code = sources.of(verdict.name.rpartition(".")[0])
        is_module = verdict.index in (*WEIGHTS, LoadedIndex.BUFFER)
        return (code.described if code else "") if is_module else sources.optimizer_state
    if kind is Kind.COUNTED and verdict.index in _OF_OPTIMIZERS:
        return sources.optimizer
    reduced = kind is Kind.COUNTED and verdict.index == Statistic.REDUCED.number
    of_norm = kind in (Kind.GRAD_NORM, Kind.COUNTED) and not reduced
    if of_norm or (finding is not None and _CLIPPING in finding.axes):
        calls = _reductions(_of(ledger, verdict, Phase.OPTIMIZER))
        norms = (call.where for call in calls if call.dtype.startswith("float"))
        return next(norms, sources.optimizer)
    cited = cite(verdict, finding, ledger)
    if cited is not None and cited.lacking:
        return _of_sibling(ledger, verdict, cited.lacking[0])
    axes = _axes(finding)
    calls = [c for c in _reductions(cited.ran if cited else ()) if set(axes) & _spans(c.group)]
    if calls:
        return _of_reduction(verdict, calls, alone=alone)
    if kind is Kind.METRIC:
        # What is not logged here would be by what logs the others.
        return sources.metrics.get(verdict.name, next(iter(sources.metrics.values()), ""))
    if reduced:
        calls = _reductions(_of(ledger, verdict, Phase.GRADIENTS))
        return next((call.where for call in calls), sources.finalize)
    if verdict.direction is Direction.UPDATE and kind is not Kind.BUFFER:
        return sources.optimizer
    name = verdict.name.partition("#")[0]
    if finding is not None and finding.cause is Cause.LAYER_NUMBERS:
        return _layer(sources, name).built
    code = sources.of(name) or sources.of(ROOT) or ModuleCode()
    if isinstance(finding, LossShare) and code.scaler:
        return code.scaler
    if verdict.direction is Direction.START:
        return code.built or code.forward
    if verdict.direction is Direction.GRADIENT:
        return (not axes and (code.weight or code.backward)) or sources.finalize
    if kind is Kind.GRAD_OUTPUT:
        return code.user or (sources.of(name.rpartition(".")[0] or ROOT) or code).forward
    if verdict.direction is Direction.BACKWARD:
        return code.backward or code.forward
    # All that a container calls is right: what is left are its own functions.
    around = name == ROOT or any(module.startswith(f"{name}.") for module in sources.modules)
    return (kind is Kind.OUTPUT and around and code.output) or code.forward


def _reductions(calls: Iterable[Collective]) -> list[Collective]:
    return [call for call in calls if call.operation.reduces and call.where]


def _of_reduction(verdict: Judged, calls: Sequence[Collective], *, alone: bool) -> str:
    """The call that is about as many tensors as are known to have the fault."""
    fit = [call for call in calls if call.bytes >= _LEAST_BYTES * math.prod(verdict.shape)]
    if fit and alone and verdict.direction is Direction.GRADIENT:
        # What reduces few tensors with this one, rather than all.
        total = Counter[str]()
        for call in calls:
            total[call.where] += call.bytes
        return min(fit, key=lambda call: total[call.where]).where
    return max(calls, key=lambda call: call.bytes).where


_PARTS = {
    Direction.GRADIENT: (Phase.GRADIENTS,),
    Direction.UPDATE: (Phase.OPTIMIZER, Phase.PARAMETERS),
}
"""Parts of a step that concern all parameters."""


def in_culprits(changed: ChangedCode, culprits: Iterable[Culprit]) -> ChangedCode:
    """The same, with the code that ran in a culprit marked as such, and first."""
    blamed = [(pattern(c.name.partition("#")[0]), c.direction) for c in culprits]

    def judged(function: ChangedFunction) -> ChangedFunction:
        is_inside = any(
            any(_is_in(module, name, direction) for module in function.modules)
            or not {*function.phases}.isdisjoint(_PARTS.get(direction, ()))
            for name, direction in blamed
        )
        if function.ran is not Execution.ELSEWHERE or not is_inside:
            return function
        return dataclasses.replace(function, ran=Execution.IN_CULPRIT)

    order = list(Execution)
    functions = sorted(map(judged, changed.functions), key=lambda f: order.index(f.ran))
    return dataclasses.replace(changed, functions=tuple(functions))


def _is_in(module: str, name: str, direction: Direction) -> bool:
    """Whether a module is a culprit, inside of it, or has the parameter that is the culprit."""
    is_parameter = direction not in (Direction.FORWARD, Direction.BACKWARD)
    owns = is_parameter and name.rpartition(".")[0] == module
    return owns or f"{module}.".startswith(f"{name}.")


def _of_sibling(ledger: Ledger, verdict: Judged, what: tuple[Operation, str]) -> str:
    """Where the same module of another layer calls a collective."""
    module = pattern(verdict.name.partition("#")[0])
    return next(
        call.where
        for call in _of(ledger, verdict, _PHASES[verdict.direction])
        if (call.operation, call.group) == what
        and f"{pattern(call.module)}.".startswith(f"{module}.")
    )


def _layer(sources: Sources, parameter: str) -> ModuleCode:
    """The code of a layer that no rank has: that of another one, like it."""
    layers = (
        name for name in sources.modules if pattern(parameter).startswith(f"{pattern(name)}.")
    )
    name = min((name for name in layers if name[-1].isdigit()), key=len, default="")
    return sources.of(name) or ModuleCode()


def _runs(code: ModuleCode | None) -> tuple[str, ...]:
    """What decides whether modules communicate alike; what uses their outputs may differ."""
    return () if code is None else (code.forward, code.backward, code.weight)


def _of(ledger: Ledger, verdict: Judged, phase: Phase) -> Iterable[Collective]:
    step = verdict.iteration, phase
    return (call for call in ledger.collectives if (call.iteration, call.direction) == step)


def _inside(calls: Iterable[Collective], module: str) -> Iterable[Collective]:
    """Those of a module and of what it contains."""
    return (call for call in calls if f"{call.module}.".startswith(f"{module}."))


def _axes(finding: Finding | None) -> tuple[str, ...]:
    """The mesh axes over which a finding misses, doubles or scales a reduction."""
    if finding is None or finding.cause not in _REDUCED:
        return ()
    return tuple(axis for axis in finding.axes if axis in AXES)


def _spans(group: str) -> set[str]:
    """The axes of a group; the copies of the embeddings are on pipeline stages."""
    axes = set(group.split("-"))
    return axes | {"pp"} if "embedding" in axes else axes


def _without(
    axes: Iterable[str], ran: Iterable[Collective], unseen: Iterable[str]
) -> tuple[str, ...]:
    """Axes over which nothing is reduced: none of these does, and all would have been seen."""
    spanned = {axis for call in ran if call.operation.reduces for axis in _spans(call.group)}
    return tuple(axis for axis in axes if axis not in spanned.union(unseen))
