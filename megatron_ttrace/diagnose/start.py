# SPDX-License-Identifier: Apache-2.0
"""A start that failed: what the step computes from it does not show whether the step is right.

The checker's own start values go into parameters by name, place and layer number. Where these are
wrong (a mark of parallelism is lost, two pipeline stages number their layers alike, no stage has a
layer), the step begins from other parameters than the reference's, and everything in it differs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.findings import (
    Cause,
    MisplacedLayers,
    Note,
    OtherDivision,
    OtherNumber,
    Remark,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import Grounds, Reason
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    Direction,
    Kind,
    LoadedIndex,
    Outcome,
    ParamIndex,
    TraceKey,
)
from megatron_ttrace.trace.states import SCHEDULED, SCHEDULER

DIVIDING = ("tp", "etp", "ep")
"""Axes over which a parameter is divided by its module, by a mark on it."""

_OTHER_START = (
    Outcome.DIVERGED,
    Outcome.REPLICA_CONFLICT,
    Outcome.NONFINITE,
    Outcome.SHAPE,
    Outcome.UNCOVERED,
)

_LOADED: dict[int, Grounds] = {
    LoadedIndex.ONE_DEVICE: Grounds.LOADED,
    LoadedIndex.ROUNDED: Grounds.LOADED_MAIN,
    LoadedIndex.AGREED: Grounds.LOADED_AGREED,
    LoadedIndex.NUMBER: Grounds.LOADED_NUMBER,
}
WEIGHTS = (LoadedIndex.ONE_DEVICE, LoadedIndex.AGREED, LoadedIndex.WEIGHT)
"""What the weights of a model must be."""
_LAYER = re.compile(r"^(|.*?\.)layers\.(\d+)\.")

Layer = tuple[str, int]
"""What precedes ``layers`` in its name, and its number."""
Stages = Mapping[int, set[Layer]]
"""The layers that each pipeline stage holds; empty if the ranks' places are not known."""


def loaded(verdicts: Iterable[Judged]) -> list[tuple[Judged, Grounds]]:
    """What was loaded wrongly, without what follows from it.

    Of main weights, those whose weights are right; of learning rates, those that the scheduler's
    own numbers do not make wrong.
    """
    verdicts = [verdict for verdict in verdicts if verdict.kind is Kind.LOADED]
    passed = {(v.name, v.index) for v in verdicts if not v.verdict.is_failure}
    failed = {(v.name, v.index): v for v in verdicts if v.verdict.is_failure}
    wrong = {name for name, index in failed if index in WEIGHTS}
    is_scheduled = any(name.startswith(SCHEDULER) for name, _ in failed)

    def follows(name: str, index: int) -> bool:
        if index == LoadedIndex.NUMBER:
            is_of_group = not name.startswith(SCHEDULER)
            return is_scheduled and is_of_group and name.rpartition(".")[2] in SCHEDULED
        main = (name, LoadedIndex.MAIN)
        return index == LoadedIndex.ROUNDED and (name in wrong or main in failed)

    def grounds(name: str, index: int) -> Grounds:
        one_device, stored = (name, LoadedIndex.ONE_DEVICE), (name, LoadedIndex.WEIGHT)
        if index in WEIGHTS:
            if {one_device, stored} <= failed.keys():
                return Grounds.LOADED_NEITHER
            if one_device in failed and stored in passed:
                return Grounds.LOADED_ONE_DEVICE
            if stored in failed and one_device in passed:
                return Grounds.LOADED_ALIKE
        if index == LoadedIndex.ROUNDED and (name, LoadedIndex.MAIN) in passed:
            return Grounds.SAVED_MAIN
        return _LOADED.get(index, Grounds.LOADED_STORED)

    return [(v, grounds(*key)) for key, v in failed.items() if not follows(*key)]


def other_number(evidence: Evidence) -> OtherNumber:
    """The numbers that ranks loaded, and the one that is stored."""
    values = {float(piece) for part in evidence.parts for piece in part.pieces}
    return OtherNumber(Cause.NUMBER, values=tuple(sorted(values)), stored=float(evidence.reference))


def is_start(key: TraceKey) -> bool:
    """Whether this is a parameter before the step."""
    return (
        key.kind is Kind.PARAM and key.index == ParamIndex.BEFORE and key.microbatch == STEP_LEVEL
    )


def stages_of(started: Mapping[int, Iterable[str]], meshes: Sequence[Mesh]) -> Stages:
    """The layers of each pipeline stage, from the parameters of each rank."""
    stages: dict[int, set[Layer]] = {}
    if all(rank < len(meshes) for rank in started):
        for rank, names in started.items():
            stages.setdefault(meshes[rank].at("pp"), set()).update(_layers(names))
    return stages


def claims(verdicts: Iterable[Judged], stages: Stages) -> list[Judged]:
    """The verdicts, where parameters of a layer that several pipeline stages hold are failures."""
    reviewed = []
    for verdict in verdicts:
        for layer in _layers([verdict.name] if is_start(verdict.key) else []):
            at = [stage for stage, layers in stages.items() if layer in layers]
            if len(at) > 1:
                notes = (Note(Remark.CLAIMED, layer[1], text=" and ".join(map(str, at))),)
                verdict = dataclasses.replace(verdict, verdict=Outcome.EXTRA, notes=notes)
        reviewed.append(verdict)
    return reviewed


def without_consequences(verdicts: Sequence[Judged]) -> list[Judged]:
    """The verdicts, where failures that only show another start are unchecked, with this reason."""
    begun = [
        verdict.iteration
        for verdict in verdicts
        if is_start(verdict.key)
        and (
            verdict.verdict in _OTHER_START
            or (verdict.verdict is Outcome.EXTRA and _layers([verdict.name]))
        )
    ]
    return [
        verdict.unchecked(Reason.OTHER_START)
        if begun
        and verdict.verdict.is_failure
        and verdict.iteration >= min(begun)
        and verdict.direction is not Direction.START
        else verdict
        for verdict in verdicts
    ]


def other_division(
    shape: Sequence[int],
    taken: Iterable[Sequence[int]],
    meshes: Sequence[Mesh],
    axes: Sequence[str],
) -> OtherDivision | None:
    """Every rank's part is taken for the whole parameter, or the whole parameter for a part.

    The repair: divide, or do not divide, one dim over one of ``axes``. What each rank takes for the
    parameter's shape (``taken``) is then the reference's.
    """
    shapes = set(map(tuple, taken))
    if len(shapes) != 1 or not meshes or len(ranks_shape := shapes.pop()) != len(shape):
        return None
    pairs = enumerate(zip(ranks_shape, shape, strict=True))
    odd = [(dim, ours, right) for dim, (ours, right) in pairs if ours != right]
    if len(odd) != 1:
        return None
    dim, ours, right = odd[0]
    small, large = sorted((ours, right))
    fits = tuple(axis for axis in axes if small * meshes[0].size(axis) == large)
    if not fits:
        return None
    return OtherDivision(
        Cause.DIVISION, fits, dim=dim, held=ours, total=right, inverse=ours > right
    )


def misplaced_layers(
    name: str, expected: Iterable[str], stages: Stages, chunks: int = 1
) -> MisplacedLayers | None:
    """Whole layers are on no stage, or on several. The repair: hold or number each layer once.

    ``name`` is that of the parameter that is missing or held too often, ``expected`` are the
    reference's; each stage has so many ``chunks`` of the model.
    """
    layer = next(iter(_layers([name])), None)
    if layer is None or not stages:
        return None
    reference = {other for other in _layers(expected) if other[0] == layer[0]}
    by_stage = [{o for o in stages[stage] if o[0] == layer[0]} for stage in sorted(stages)]
    everywhere = set().union(*by_stage)
    lost, strange = reference - everywhere, everywhere - reference
    twice = {o for o in everywhere if sum(o in layers for layers in by_stage) > 1}
    if layer not in lost | strange | twice:
        return None
    is_misnumbered = bool(twice or strange)
    chunks *= len(by_stage)
    dropped = not is_misnumbered and chunks > 1 and len(lost) == len(reference) % chunks
    return MisplacedLayers(
        Cause.LAYER_NUMBERS if is_misnumbered else Cause.LAYERS,
        ("pp",),
        missing=_numbers(lost),
        twice=_numbers(twice),
        strange=_numbers(strange),
        total=len(reference),
        held=tuple(map(len, by_stage)),
        divisor=chunks if dropped else 0,
    )


def _numbers(layers: Iterable[Layer]) -> tuple[int, ...]:
    return tuple(sorted(number for _, number in layers))


def _layers(names: Iterable[str]) -> set[Layer]:
    """The layers that parameters belong to."""
    matches = filter(None, map(_LAYER.match, names))
    return {(match[1], int(match[2])) for match in matches}
