# SPDX-License-Identifier: Apache-2.0
"""What counts as found."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.evaluation.bugs.catalogue import Expected
from megatron_ttrace.evaluation.bugs.expect import Looked, assess, looked
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import Culprit, Direction, Kind, Outcome, Result, Summary

PACKAGE = Path(__file__).parents[3] / "megatron_ttrace"
EXPECTED = Expected(
    "decoder.layers.*.mlp",
    Kind.OUTPUT,
    Direction.FORWARD,
    (Outcome.DIVERGED,),
    cause=Cause.PARTIAL,
    axes=("tp",),
)
CULPRIT = Culprit(
    name="decoder.layers.3.mlp",
    kind=Kind.OUTPUT,
    direction=Direction.FORWARD,
    reason="",
    explanation="times TP",
    iteration=1,
    microbatch=0,
    index=0,
    verdict=Outcome.DIVERGED,
    ranks=(0,),
    rel_err=1.0,
    rel_err_eps=1.0,
    tolerance=0.1,
    margin=10.0,
    cause=Cause.PARTIAL,
    axes=("tp", "cp"),
)


def summary(*culprits: Culprit, verdict: Result = Result.DIVERGED) -> Summary:
    return Summary(verdict, {}, culprits, {}, {}, {})


@pytest.mark.parametrize(
    ("changes", "expected", "reached", "problem"),
    [
        ({}, EXPECTED, (True, True), ""),
        ({"name": "decoder.layers.3.self_attention"}, EXPECTED, (False, False), "self_attention"),
        ({"kind": Kind.GRAD_INPUT}, EXPECTED, (False, False), "grad_input"),
        ({"direction": Direction.BACKWARD}, EXPECTED, (False, False), "backward"),
        ({"verdict": Outcome.SHAPE}, EXPECTED, (False, False), "shape"),
        ({"cause": None}, EXPECTED, (True, False), "explains it as: times TP"),
        ({"cause": Cause.TOO_LARGE}, EXPECTED, (True, False), "times TP"),
        ({"axes": ("cp",)}, EXPECTED, (True, False), "times TP"),
        ({"cause": None}, dataclasses.replace(EXPECTED, cause=None), (True, None), ""),
    ],
)
def test_assessment(
    changes: dict[str, Any], expected: Expected, reached: tuple[bool, bool | None], problem: str
) -> None:
    """Module, kind, direction, verdict, cause and axes are as expected; no words are read."""
    assessment = assess(summary(dataclasses.replace(CULPRIT, **changes)), expected)
    assert assessment.detected
    assert (assessment.localised, assessment.explained) == reached
    assert assessment.met == (not problem)
    assert problem in assessment.problem


def test_a_stray_is_not_localised() -> None:
    """Blaming an innocent module besides the guilty one is a mistake too."""
    stray = dataclasses.replace(CULPRIT, name="output_layer", margin=5.0)
    assessment = assess(summary(CULPRIT, stray), EXPECTED)
    assert (assessment.localised, assessment.margin) == (False, 5.0)
    assert "also names output_layer" in assessment.problem
    assert assess(summary(CULPRIT, stray), dataclasses.replace(EXPECTED, only="*")).localised


@pytest.mark.parametrize(("layers", "localised"), [(4, True), (5, True), (3, False)])
def test_all_but_the_last_layer(layers: int, localised: bool) -> None:
    """Where the last layer must not be named, its number comes from the report."""
    names = [f"decoder.layers.{layer}.mlp" for layer in range(layers)]
    report = summary(*(dataclasses.replace(CULPRIT, name=name) for name in names[:3]))
    report = dataclasses.replace(report, execution_order=("embedding", *names, "output_layer"))
    expected = dataclasses.replace(EXPECTED, only="decoder.layers.[!{last}].*")
    assert assess(report, expected).localised == localised


def test_nothing_found() -> None:
    """An equivalent run is a missed bug."""
    assessment = assess(summary(verdict=Result.EQUIVALENT), EXPECTED)
    assert (assessment.detected, assessment.localised, assessment.met) == (False, False, False)
    assert assessment.problem == "found equivalent"


def test_who_reads_the_flag() -> None:
    """``settings.bug`` is read where the fault is put in and nowhere else (see test_house.py)."""
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\.(ttrace_)?bug\b", path.read_text())
    }
    # A suite's row has a bug, too.
    readers -= {"cli/bugs.py", "evaluation/bugs/suite.py"}
    assert readers == {"jobs/settings.py", "run/loop.py", "run/entry.py"}


RIGHT = Place("megatron/core/a.py", 3, "A.forward", Clue.RAN)
INSIDE = dataclasses.replace(RIGHT, function="A.forward.hook")
BESIDE = dataclasses.replace(RIGHT, function="A.forward2")
IN_PACKAGE = dataclasses.replace(RIGHT, file="megatron/core/a/__init__.py")
ELSEWHERE = dataclasses.replace(RIGHT, file="megatron/core/b.py")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ((RIGHT,), Looked(True, True, True, True)),
        ((INSIDE,), Looked(True, True, True, True)),
        ((IN_PACKAGE,), Looked(True, True, True, True)),
        ((BESIDE, ELSEWHERE), Looked(True, False, True, False)),
        ((ELSEWHERE, BESIDE, RIGHT), Looked(False, False, True, True)),
        ((ELSEWHERE,) * 3 + (RIGHT,), Looked(False, False, False, False)),
        ((), Looked(False, False, False, False)),
    ],
)
def test_looked(places: tuple[Place, ...], expected: Looked) -> None:
    """By file and function, of the first culprit."""
    culprits = [
        dataclasses.replace(CULPRIT, places=places),
        dataclasses.replace(CULPRIT, places=(RIGHT,)),
    ]
    assert looked(culprits, [("megatron.core.a", "A.forward")]) == expected
    assert not looked([], [("megatron.core.a", "A.forward")]).file_first
