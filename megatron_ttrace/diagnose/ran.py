# SPDX-License-Identifier: Apache-2.0
"""What the ledger of a traced step shows about a culprit: its collectives, and changed code.

Both are observed, not tested: they are hints, not causes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from megatron_ttrace.diagnose.scaling import FACTORS
from megatron_ttrace.placement.mesh import AXES
from megatron_ttrace.trace.collectives import (
    Citation,
    Collective,
    Ledger,
    ModuleCode,
    Phase,
    Sources,
    pattern,
)
from megatron_ttrace.trace.executed import ChangedCode, ChangedFunction, Execution
from megatron_ttrace.trace.findings import Cause, Finding
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.records import Culprit, Direction, Kind

_PHASES = {
    Direction.FORWARD: Phase.FORWARD,
    Direction.BACKWARD: Phase.BACKWARD,
    Direction.GRADIENT: Phase.GRADIENTS,
}
_OUTSIDE = (Kind.INPUT, Kind.LOSS)
"""What was made before its module ran, or outside of modules."""
_REDUCED = (Cause.PARTIAL, *FACTORS)
"""Causes that concern a reduction over the axes of the finding."""


def cite(verdict: Judged, finding: Finding | None, ledger: Ledger) -> Citation | None:
    """The collectives that ran in the module of a failed tensor, in its direction.

    ``None`` if none are recorded, the tensor comes from no module's computation, or the module may
    communicate unseen.
    """
    phase = None if verdict.kind in _OUTSIDE else _PHASES.get(verdict.direction)
    if phase is None or not ledger.recorded or not ledger.collectives:
        return None
    axes, step = _axes(finding), (verdict.iteration, phase)
    calls = [call for call in ledger.collectives if (call.iteration, call.direction) == step]
    if phase not in (Phase.FORWARD, Phase.BACKWARD):
        ran = tuple(call for call in calls if call.axes.intersection(axes))
        return Citation(phase, ran, _without(axes, ran, ledger.unseen)) if axes else None
    module = module_of(verdict.name)
    ran = tuple(_inside(calls, module))
    parts = _parts(ledger.sources, pattern(module))
    siblings = [name for name in parts if name != module and parts[name] == parts.get(module)]
    theirs = [
        dict.fromkeys((call.operation, call.group) for call in _inside(calls, name))
        for name in siblings
    ]
    ours = {(call.operation, call.group) for call in ran}
    common = theirs[0] if theirs else ()
    lacking = tuple(c for c in common if c not in ours and all(c in sibling for sibling in theirs))
    if ledger.unseen and not ran and not lacking:
        return None
    return Citation(phase, ran, _without(axes, ran, ledger.unseen), lacking, len(siblings))


PARTS = {
    Direction.GRADIENT: (Phase.GRADIENTS,),
    Direction.UPDATE: (Phase.OPTIMIZER, Phase.PARAMETERS),
}
"""Parts of a step that concern all parameters."""


def in_culprits(changed: ChangedCode, culprits: Iterable[Culprit]) -> ChangedCode:
    """The same, with the code that ran in a culprit marked as such, and first."""
    blamed = [(culprit.name, culprit.direction) for culprit in culprits]

    def judged(function: ChangedFunction) -> ChangedFunction:
        if function.ran is Execution.ELSEWHERE and any(ran_in(function, *it) for it in blamed):
            return dataclasses.replace(function, ran=Execution.IN_CULPRIT)
        return function

    order = list(Execution)
    functions = sorted(map(judged, changed.functions), key=lambda f: order.index(f.ran))
    return dataclasses.replace(changed, functions=tuple(functions))


def ran_in(function: ChangedFunction, name: str, direction: Direction) -> bool:
    """Whether changed code ran in a culprit, or in the part of the step that is."""
    name = pattern(module_of(name))
    return any(_is_in(module, name, direction) for module in function.modules) or (
        not {*function.phases}.isdisjoint(PARTS.get(direction, ()))
    )


def _is_in(module: str, name: str, direction: Direction) -> bool:
    """Whether a module is a culprit, inside of it, or has the parameter that is the culprit."""
    is_parameter = direction not in (Direction.FORWARD, Direction.BACKWARD)
    owns = is_parameter and name.rpartition(".")[0] == module
    return owns or f"{module}.".startswith(f"{name}.")


def _parts(sources: Sources, layers: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Modules of a pattern, each with what runs in it and in the modules inside of it.

    Layers of one class may differ in those.
    """
    parts: dict[str, dict[str, tuple[str, ...]]]
    parts = {name: {} for name in sources.modules if pattern(name) == layers}
    for name in sources.modules:
        words = name.split(".")
        for module in itertools.accumulate(words, "{}.{}".format):
            if module in parts:
                parts[module][name.removeprefix(module)] = _runs(sources.of(name))
    return parts


def _runs(code: ModuleCode | None) -> tuple[str, ...]:
    """What decides whether modules communicate alike; what uses their outputs may differ."""
    return () if code is None else (code.forward, code.backward, code.weight)


def _inside(calls: Iterable[Collective], module: str) -> Iterable[Collective]:
    """Those of a module and of what it contains."""
    return (call for call in calls if f"{call.module}.".startswith(f"{module}."))


def _axes(finding: Finding | None) -> tuple[str, ...]:
    """The mesh axes over which a finding misses, doubles or scales a reduction."""
    if finding is None or finding.cause not in _REDUCED:
        return ()
    return tuple(axis for axis in finding.axes if axis in AXES)


def _without(
    axes: Iterable[str], ran: Iterable[Collective], unseen: Iterable[str]
) -> tuple[str, ...]:
    """Axes over which nothing is reduced: none of these does, and all would have been seen."""
    spanned = {axis for call in ran if call.operation.reduces for axis in call.axes}
    return tuple(axis for axis in axes if axis not in spanned.union(unseen))
