# SPDX-License-Identifier: Apache-2.0
"""A start that failed: what the step computes from it says nothing about the step.

The checker's own start values go into parameters by name, place and layer number. Where these are
wrong (a mark of parallelism is lost, two pipeline stages number their layers alike), the step
begins from other parameters than the reference's, and everything in it differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.diagnose.absent import layer_in, stages_of
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.findings import Cause, Grounds, Note, OtherDivision, Remark
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import (
    AGREED,
    MAIN,
    ONE_DEVICE,
    STEP_LEVEL,
    Direction,
    Kind,
    Outcome,
    Reason,
    TraceKey,
)

DIVIDING = ("tp", "etp", "ep")
"""Axes over which a parameter is divided by its module, by a mark on it."""

_OTHER_START = (
    Outcome.DIVERGED,
    Outcome.REPLICA_CONFLICT,
    Outcome.NONFINITE,
    Outcome.SHAPE,
    Outcome.UNCOVERED,
)

_LOADED = {
    ONE_DEVICE: Grounds.LOADED,
    MAIN: Grounds.LOADED_MAIN,
    AGREED: Grounds.LOADED_AGREED,
}


def loaded(verdicts: Iterable[Judged]) -> list[tuple[Judged, Grounds]]:
    """Parameters that were loaded wrongly; of main weights, those whose weights are right."""
    failed = [one for one in verdicts if one.kind is Kind.LOADED and one.verdict.is_failure]
    wrong = {verdict.name for verdict in failed if verdict.index != MAIN}
    return [
        (verdict, _LOADED[verdict.index])
        for verdict in failed
        if verdict.index != MAIN or verdict.name not in wrong
    ]


def is_start(key: TraceKey) -> bool:
    """Whether this is a parameter before the step."""
    return key.kind is Kind.PARAM and key.index == 0 and key.microbatch == STEP_LEVEL


def claims(
    verdicts: Iterable[Judged], measured: Mapping[int, Sequence[Measured]], meshes: Sequence[Mesh]
) -> list[Judged]:
    """The verdicts, where parameters of a layer that several pipeline stages hold are failures."""
    held = {
        rank: [one.key.name for one in found if is_start(one.key)]
        for rank, found in measured.items()
    }
    stages = stages_of(held, meshes)
    found = []
    for verdict in verdicts:
        layer = layer_in(verdict.name) if is_start(verdict.key) else None
        at = [stage for stage, layers in stages.items() if layer in layers]
        if layer is not None and len(at) > 1:
            text = " and ".join(map(str, at))
            notes = (Note(Remark.CLAIMED, layer[1], text=text),)
            verdict = dataclasses.replace(verdict, verdict=Outcome.EXTRA, notes=notes)
        found.append(verdict)
    return found


def without_consequences(verdicts: Sequence[Judged]) -> list[Judged]:
    """The verdicts, where failures that only show another start are unchecked, with this reason."""
    begun = [
        verdict.iteration
        for verdict in verdicts
        if is_start(verdict.key) and (verdict.verdict in _OTHER_START or _is_claimed(verdict))
    ]
    if not begun:
        return list(verdicts)
    notes = (Note(Remark.OTHER_START),)
    return [
        dataclasses.replace(one, verdict=Outcome.UNCHECKED, reason=Reason.OTHER_START, notes=notes)
        if one.verdict.is_failure
        and one.iteration >= min(begun)
        and one.direction is not Direction.START
        else one
        for one in verdicts
    ]


def other_division(
    shape: Sequence[int],
    taken: Iterable[Sequence[int]],
    meshes: Sequence[Mesh],
    axes: Sequence[str],
) -> OtherDivision | None:
    """Every rank's part is taken for the whole parameter, or the whole one for a part.

    The repair: divide, or do not divide, one dim over one axis. The shape is then the reference's.

    Args:
        shape: of the reference's parameter.
        taken: what each rank takes for the shape of the whole parameter.
        meshes: of all ranks.
        axes: over which parameters of its sort can be divided.
    """
    found = {tuple(one) for one in taken}
    if len(found) != 1 or not meshes:
        return None
    held = found.pop()
    odd = [dim for dim, (a, b) in enumerate(zip(held, shape, strict=False)) if a != b]
    if len(held) != len(shape) or len(odd) != 1:
        return None
    small, large = sorted((held[odd[0]], shape[odd[0]]))
    fits = tuple(axis for axis in axes if small * meshes[0].size(axis) == large)
    if not fits:
        return None
    return OtherDivision(
        Cause.DIVISION,
        fits,
        dim=odd[0],
        held=held[odd[0]],
        total=shape[odd[0]],
        inverse=held[odd[0]] > shape[odd[0]],
    )


def _is_claimed(verdict: Judged) -> bool:
    """Whether ``claims`` made this failure: the reference has this parameter."""
    return verdict.verdict is Outcome.EXTRA and layer_in(verdict.name) is not None
