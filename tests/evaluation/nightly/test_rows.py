# SPDX-License-Identifier: Apache-2.0
"""From what the commands print to cases."""

import math

import pytest

from megatron_ttrace.evaluation.bugs import catalogue, suite
from megatron_ttrace.evaluation.nightly import rows
from megatron_ttrace.evaluation.nightly.records import State
from tests.evaluation.nightly.synthetic import bug_row, matrix_row, mutant_row, mutants_report


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
    found = rows.known_bug(bug_row(**changes))
    assert found.state is state
    assert found.name == "01 tp-embedding-mask [TP 2]"
    assert found.note == changes.get("problem", "they all hold row 0")


def test_margins() -> None:
    """A missing layer has none; an infinite one travels as a string."""
    assert rows.known_bug(bug_row(margin=None)).margin is None
    assert rows.known_bug(bug_row(margin="inf")).margin == math.inf
    assert rows.known_bug(bug_row()).margin == 65.6
    assert rows.known_bug(bug_row()).marks == "detected, localised, explained"


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        ("equivalent", State.GOOD),
        ("diverged", State.ALARM),
        ("could not check", State.BROKEN),
    ],
)
def test_configuration(verdict: str, state: State) -> None:
    """State, margin, marks and note of a healthy job."""
    found = rows.configuration(matrix_row(verdict=verdict))
    assert found.state is state
    assert (found.margin is None) == (state is State.BROKEN)


@pytest.mark.parametrize(
    ("verdict", "state", "words"),
    [
        ("diverged", State.GOOD, "as in docs/findings.md"),
        ("equivalent", State.MISSED, "no longer present"),
        ("could not check", State.BROKEN, "MTP and CP"),
    ],
)
def test_a_fault_of_megatrons(verdict: str, state: State, words: str) -> None:
    """It must be found, and its margin says nothing about healthy jobs."""
    row = matrix_row(verdict=verdict, finding="MTP and CP", worst_margin="1e6")
    found = rows.configuration(row)
    assert found.state is state
    assert found.margin is None
    assert words in found.note


@pytest.mark.parametrize(
    ("changes", "state", "note"),
    [
        ({}, State.GOOD, "linear_proj"),
        ({"fate": "crashed"}, State.GOOD, "linear_proj"),
        ({"fate": "survived"}, State.MISSED, "without an explanation"),
        ({"fate": "survived", "explanation": "unseen", "why": "a hole"}, State.GOOD, "a hole"),
        ({"fate": "survived", "explanation": "equivalent", "why": "p"}, State.GOOD, "p"),
        ({"explanation": "equivalent", "why": "no number depends"}, State.ALARM, "but was found"),
    ],
)
def test_mutant(changes: dict, state: State, note: str) -> None:
    """State, marks and note of a mutant."""
    (found,), scores = rows.mutants(mutants_report(mutant_row(**changes)))
    assert found.state is state
    assert note in found.note
    assert scores["mutation score"] == 1.0


def test_score_below_the_bar() -> None:
    """Explained survivors are not missed one by one, but too many of them are."""
    survivor = mutant_row(fate="survived", explanation="unseen", why="a hole")
    report = mutants_report(survivor, score=0.0, passed=False)
    states = [case.state for case in rows.mutants(report)[0]]
    assert states == [State.GOOD, State.MISSED]
