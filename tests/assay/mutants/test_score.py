# SPDX-License-Identifier: Apache-2.0
"""Counting."""

import dataclasses

import pytest

from megatron_ttrace.trace.findings import Cause
from tests.assay.mutants.records import (
    Explanation,
    Fate,
    Mutant,
    MutantRow,
    MutantTrial,
    Ran,
    Span,
)
from tests.assay.mutants.score import passes, score
from tests.assay.mutants.synthetic import culprit

MUTANT = Mutant("m:f:o:0", "megatron.core.optimizer.x", "f", "o", Span(1, 0, 1, 1), "a", "b")
KILLED, CRASHED, HUNG, SURVIVED = Fate.DIVERGED, Fate.CRASHED, Fate.HUNG, Fate.SURVIVED
PROVEN, DORMANT, HOLE = Explanation.EQUIVALENT, Explanation.DORMANT, Explanation.UNSEEN


def rows(*outcomes):
    return [MutantRow(MUTANT, (MutantTrial("tp2", fate, 1.0),), why) for fate, why in outcomes]


@pytest.mark.parametrize(
    ("outcomes", "of_all", "of_silent"),
    [
        ([(KILLED, None)] * 3 + [(SURVIVED, None)], 0.75, 0.75),
        ([(KILLED, None), (CRASHED, None), (HUNG, None), (SURVIVED, HOLE)], 0.75, 0.5),
        # What is proven not to be a fault does not count; a hole does.
        ([(KILLED, None), (SURVIVED, PROVEN), (SURVIVED, HOLE)], 0.5, 0.5),
        ([(SURVIVED, PROVEN)], 1.0, 1.0),
        # So does one that is only said to have no effect.
        ([(KILLED, None)] * 2 + [(SURVIVED, DORMANT), (SURVIVED, HOLE)], 0.5, 0.5),
        ([], 1.0, 1.0),
    ],
)
def test_score(outcomes, of_all, of_silent):
    """Killed of all that count, and of those that are silent."""
    shares = score(rows(*outcomes)).shares
    assert (shares["score"], shares["silent_score"]) == (of_all, of_silent)


def test_bar():
    """95 % are enough."""
    assert passes(rows(*[(KILLED, None)] * 19, (SURVIVED, None)))
    assert not passes(rows(*[(KILLED, None)] * 18, (SURVIVED, None)))


def test_a_proof_that_is_wrong():
    """What was said to be no fault is found: whatever the score, somebody must look."""
    assert not passes(rows(*[(KILLED, None)] * 19, (KILLED, PROVEN)))


def test_inert():
    """What changes no job does not count as missed, unless that is asked."""
    dormant, seen = rows((SURVIVED, DORMANT), (KILLED, None))
    total = score([dataclasses.replace(dormant, inert=True), seen])
    assert (total.inert, total.survived) == (1, 0)
    assert total.shares["silent_score"] == 1.0
    assert total.shares["with_inert"] == 0.5


def test_last_trial_counts():
    """Trials end with the first that kills."""
    row = MutantRow(MUTANT, (MutantTrial("tp2", SURVIVED, 1.0), MutantTrial("pp2", KILLED, 1.0)))
    assert row.fate is KILLED
    assert score([row]).diverged == 1
    assert row.to_json()["fate"] == "diverged"


def test_diagnoses():
    """The right module, and causes that are told, of what the check finds."""

    def found(name: str, cause: Cause | None) -> MutantRow:
        mutant = dataclasses.replace(MUTANT, operator="lost-scale")
        told = culprit(name, cause=cause)
        trial = MutantTrial("tp2", KILLED, 1.0, culprits=(told,), ran=Ran(("decoder",)))
        return MutantRow(mutant, (trial,))

    total = score(
        [
            found("decoder", Cause.TOO_LARGE),
            found("decoder", Cause.ZERO),
            found("decoder", None),
            found("output_layer", Cause.FACTOR),
            *rows((CRASHED, None), (SURVIVED, None)),
        ]
    )
    assert (total.right, total.true, total.wrong) == (3, 2, 1)
    shares = total.shares
    assert (shares["right_module"], shares["cause_told"]) == (0.75, 0.75)
    assert shares["cause_true"] == pytest.approx(2 / 3)


def test_package():
    """The part after ``megatron.core``."""
    assert MUTANT.package == "optimizer"
