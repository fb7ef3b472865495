# SPDX-License-Identifier: Apache-2.0
"""From what the commands print to cases."""

import dataclasses
import json
import math

import pytest

from megatron_ttrace.evaluation.bugs import catalogue, suite
from megatron_ttrace.evaluation.nightly import records
from megatron_ttrace.evaluation.nightly.records import NightPart, State
from megatron_ttrace.evaluation.recipes.collect import Answer
from megatron_ttrace.evaluation.recipes.run import JobRow
from tests.evaluation.nightly.synthetic import bug_row, matrix_row


def test_rows_made_by_hand_are_like_those_of_the_suite() -> None:
    """Else these tests would read what nothing writes."""
    bug = catalogue.load_catalogue()[0]
    written = suite.BugRow(bug, bug.layouts[0], 1.0).to_json()
    assert written.keys() == bug_row().keys()


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, State.GOOD),
        ({"met": False, "localised": False, "problem": "names no module"}, State.MISSED),
        ({"met": False, "healthy": False}, State.ALARM),
        (
            {"met": False, "healthy": None, "detected": None, "problem": "rank 0 failed"},
            State.BROKEN,
        ),
    ],
)
def test_bug(changes: dict, state: State) -> None:
    """State, margin, marks and note of a known bug."""
    margin = "inf" if state is State.GOOD else None
    case = records.known_bug(bug_row(**changes, margin=margin))
    assert case.state is state
    assert case.name == "01 tp-embedding-mask [TP 2]"
    assert case.note == changes.get("problem", "they all hold row 0")
    # An infinite margin travels as a string.
    assert case.margin == (math.inf if state is State.GOOD else None)
    assert (case.marks == "detected, localised, explained") == (state in (State.GOOD, State.ALARM))


@pytest.mark.parametrize(
    ("verdict", "finding", "state", "margin", "words"),
    [
        ("equivalent", "", State.GOOD, 1e6, ""),
        ("diverged", "", State.ALARM, 1e6, ""),
        ("could not check", "", State.BROKEN, None, ""),
        # A fault of Megatron must be found, and its margin says nothing about healthy jobs.
        ("diverged", "MTP and CP", State.GOOD, None, "as in docs/findings.md"),
        ("equivalent", "MTP and CP", State.MISSED, None, "no longer present"),
        ("could not check", "MTP and CP", State.BROKEN, None, "MTP and CP"),
    ],
)
def test_configuration(
    verdict: str, finding: str, state: State, margin: float | None, words: str
) -> None:
    """State, margin, marks and note of a job of the matrix."""
    row = matrix_row(verdict=verdict, finding=finding, worst_margin="1e6")
    case = records.configuration(row)
    assert (case.state, case.margin) == (state, margin)
    assert words in case.note


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, State.GOOD),
        ({"answer": "refused by Megatron"}, State.GOOD),
        ({"answer": "diverged"}, State.ALARM),
        ({"answer": "diverged", "finding": "MLA"}, State.GOOD),
        ({"answer": "cannot be checked"}, State.BROKEN),
        ({"answer": "fails without ttrace too"}, State.BROKEN),
    ],
)
def test_recipe(changes: dict, state: State) -> None:
    """A recipe must be equivalent, show a finding, or be refused by Megatron itself."""
    row = dataclasses.asdict(
        JobRow(key="1a2b", answer=Answer.EQUIVALENT, ranks=2, tensors=9, why="why")
    )
    row = json.loads(json.dumps(row)) | changes
    case = records.small_job(NightPart.RECIPES, row)
    assert (case.name, case.state) == ("1a2b", state)
    assert "why" in case.note
    # A combination of options need not train.
    fails = row["answer"] == "fails without ttrace too"
    assert records.small_job(NightPart.HUNT, row).state is (State.GOOD if fails else state)
