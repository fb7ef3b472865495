# SPDX-License-Identifier: Apache-2.0
"""What the ledger of a traced step says about a culprit: its collectives, and its code.

Both are observed, not tested: they are hints, and no cause.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ttrace.compare.collectives import pattern
from megatron_ttrace.mcore import places
from megatron_ttrace.mcore.names import ROOT
from megatron_ttrace.placement.mesh import AXES
from megatron_ttrace.trace.collectives import (
    Citation,
    Collective,
    Ledger,
    ModuleCode,
    Phase,
)
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import FACTORS, Cause, Finding
from megatron_ttrace.trace.records import Direction, Kind, Verdict

_PHASES = {
    Direction.FORWARD: Phase.FORWARD,
    Direction.BACKWARD: Phase.BACKWARD,
    Direction.GRADIENT: Phase.GRADIENTS,
}
_OF_OPTIMIZERS = (Statistic.CLIPPED.number, Statistic.STEPPED.number)
_REDUCED = (Cause.PARTIAL, *FACTORS)
"""Causes that concern a reduction over the axes of the finding."""


def cite(verdict: Verdict, finding: Finding | None, ledger: Ledger) -> Citation | None:
    """The collectives that ran in the module of a failed tensor, in its direction.

    ``None`` if none are recorded, the tensor comes from no module's computation, or the module may
    communicate unseen.
    """
    phase = _PHASES.get(verdict.direction)
    if phase is None or not ledger.recorded or not ledger.collectives:
        return None
    axes = _axes(finding)
    if phase not in (Phase.FORWARD, Phase.BACKWARD):
        ran = tuple(one for one in _of(ledger, verdict, phase) if set(axes) & _spans(one.group))
        return Citation(phase, ran, _without(axes, ran, ledger.unseen)) if axes else None
    module = verdict.name.partition("#")[0]
    ran = tuple(_inside(_of(ledger, verdict, phase), module))
    siblings = [
        name
        for name in ledger.sources.modules
        if name != module
        and pattern(name) == pattern(module)
        and ledger.sources.of(name) == ledger.sources.of(module)
    ]
    theirs = [
        {(one.operation, one.group): None for one in _inside(_of(ledger, verdict, phase), name)}
        for name in siblings
    ]
    own = {(one.operation, one.group) for one in ran}
    lacking = tuple(
        what
        for what in (theirs[0] if theirs else ())
        if what not in own and all(what in each for each in theirs)
    )
    if ledger.unseen and not ran and not lacking:
        return None
    return Citation(phase, ran, _without(axes, ran, ledger.unseen), lacking, len(siblings))


def where(verdict: Verdict, finding: Finding | None, ledger: Ledger) -> str:
    """``file:line (function)``, where to look for the cause of a failure; empty if not known.

    The call of the reduction that the finding is about, if one ran; else the autograd function that
    made the tensor, or the code of its module, of the optimizer, or of the training script.
    """
    if place := places.by_hand(finding):
        return place
    sources = ledger.sources
    if verdict.kind in (Kind.TOKENS, Kind.LOSS):
        return sources.step
    if axes := _axes(finding):
        cited = cite(verdict, finding, ledger)
        calls = [
            one
            for one in (cited.ran if cited else ())
            if one.where and one.operation.reduces and set(axes) & _spans(one.group)
        ]
        if calls:
            return max(calls, key=lambda one: one.bytes).where
    if verdict.kind is Kind.METRIC:
        return places.log()
    if verdict.kind is Kind.COUNTED and verdict.index in _OF_OPTIMIZERS:
        return sources.optimizer
    if verdict.kind is Kind.COUNTED and verdict.index == Statistic.REDUCED.number:
        ran = (one.where for one in _of(ledger, verdict, Phase.GRADIENTS) if one.operation.reduces)
        return next(filter(None, ran), sources.finalize)
    if verdict.kind in (Kind.GRAD_NORM, Kind.COUNTED):
        norms = (one for one in _of(ledger, verdict, Phase.OPTIMIZER) if one.operation.reduces)
        return next((one.where for one in norms if one.where), sources.optimizer)
    if verdict.direction is Direction.UPDATE and verdict.kind is not Kind.BUFFER:
        return sources.optimizer
    name = verdict.name.partition("#")[0]
    code = sources.of(name) or sources.of(ROOT) or ModuleCode("")
    if verdict.direction is Direction.GRADIENT:
        return (not axes and (code.weight or code.backward)) or sources.finalize
    return (verdict.direction is Direction.BACKWARD and code.backward) or code.forward


def _of(ledger: Ledger, verdict: Verdict, phase: Phase) -> Iterable[Collective]:
    return (
        one
        for one in ledger.collectives
        if one.iteration == verdict.iteration and one.direction is phase
    )


def _inside(collectives: Iterable[Collective], module: str) -> Iterable[Collective]:
    """Those of a module and of what it contains."""
    return (one for one in collectives if f"{one.module}.".startswith(f"{module}."))


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
    spanned = {axis for one in ran if one.operation.reduces for axis in _spans(one.group)}
    return tuple(axis for axis in axes if axis not in spanned.union(unseen))
