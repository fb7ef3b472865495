# SPDX-License-Identifier: Apache-2.0
"""From what the commands print to cases."""

import math

import pytest

from megatron_ttrace.evaluation.bugs import catalogue, suite
from megatron_ttrace.evaluation.nightly import rows
from megatron_ttrace.evaluation.nightly.records import State
from tests.evaluation.nightly.synthetic import (
    bug_row,
    matrix_row,
    mutant_row,
    mutants_report,
    planted_row,
)


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
        # A hole that is explained is a hole.
        ({"fate": "survived", "explanation": "unseen", "why": "a hole"}, State.MISSED, "a hole"),
        ({"fate": "survived", "explanation": "dormant", "why": "p"}, State.MISSED, "p"),
        ({"fate": "survived", "inert": True}, State.GOOD, "no job trains differently with it"),
        ({"fate": "survived", "explanation": "equivalent", "why": "p"}, State.GOOD, "p"),
        ({"explanation": "equivalent", "why": "no number depends"}, State.ALARM, "but was found"),
        ({"cause_true": False}, State.MISSED, "linear_proj"),
        ({"right_module": False}, State.GOOD, "linear_proj"),
    ],
)
def test_mutant(changes: dict, state: State, note: str) -> None:
    """State, marks and note of a mutant."""
    (found,), scores = rows.mutants(mutants_report(mutant_row(**changes)))
    assert found.state is state
    assert note in found.note
    assert ("wrong cause" in found.marks) == ("cause_true" in changes)
    assert ("wrong module" in found.marks) == ("right_module" in changes)
    assert scores["silent mutants killed"] == 1.0
    assert scores["mutants seed"] == 20261122


@pytest.mark.parametrize("size", [2.0, None])
def test_planted(size: float | None) -> None:
    """Errors that should have been found, or not been flagged."""
    found = rows.planted(planted_row(size=size, met=False, found=0.5))
    assert found.state is State.MISSED
    assert found.name == f"tp2: noise of {'2 tolerances' if size else 'its own size'}"
    assert found.marks == "50.0% found, right rank 100.0%"


def test_scores_below_their_bars() -> None:
    """Each is a case of its own; so is a job that fails without a mutant."""
    report = mutants_report(
        mutant_row(), silent_score=0.9, cause_true=0.5, unhealthy={"tp2": "diverged"}
    )
    states = {one.name: one.state for one in rows.mutants(report)[0][1:]}
    assert states == {
        "silent mutants killed": State.MISSED,
        "cause true": State.MISSED,
        "tp2": State.BROKEN,
    }
