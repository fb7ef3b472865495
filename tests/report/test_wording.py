# SPDX-License-Identifier: Apache-2.0
"""Remarks on a tensor, beside its outcome."""

import dataclasses
import math

import pytest

from megatron_ttrace.report.wording import (
    changed_texts,
    error_text,
    layout_text,
    notes_text,
)
from megatron_ttrace.trace.executed import ChangedCode, ChangedFunction, Execution
from megatron_ttrace.trace.findings import Note, Remark, Sample
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import Outcome
from tests.report.synthetic_report import culprit_of, make_summary, make_verdict

NORMAL = Sample(1e-4, 0.02)


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (Note(Remark.REPLICAS, ranks=(0, 1)), "replicas differ on ranks 0-1"),
        (Note(Remark.REPLICAS_ROUNDED, ranks=(0, 2)), "replicas differ in rounding on ranks 0,2"),
        (Note(Remark.UNEVEN, 1, 3), "held unevenly: 1 to 3 replicas"),
        (Note(Remark.SHAPE, text="(3,) is not a part"), "(3,) is not a part"),
        (Note(Reason.UNDEFINED, 40), "undefined: 40 elements are NaN in both runs"),
        (Note(Reason.BLIND, 0.5, 0.1), "blind: rounding alone moves it by 50% (bound 10%)"),
        (Note(Remark.ROUTED, 1, 8), "1 of 8 tokens are routed differently"),
        (
            Note(Remark.LOST, samples=(Sample(0.5, 0.0), NORMAL)),
            "initial values are lost: all 0.5; in the reference mean 0.0001, std 0.02",
        ),
        (Note(Remark.FEW_VALUES, limit=8), "initial values: fewer than 8 random numbers"),
        (
            Note(Remark.SAME_START, ranks=(0, 1), text="another part of it"),
            "initial values on rank 0 are bitwise equal to those of another part of it on rank 1",
        ),
    ],
)
def test_a_note(note, text):
    assert notes_text([note]) == text


@pytest.mark.parametrize(("tolerance", "text"), [(0.1, "25 % (2.1e6 ε)"), (0.0, "25 %")])
def test_an_error_of_what_is_never_rounded(tolerance: float, text: str) -> None:
    """Token ids have no epsilon."""
    verdict = make_verdict(rel_err=0.25, tolerance=tolerance)
    assert error_text(dataclasses.replace(verdict, rel_err_eps=2.1e6)) == text


def test_an_error_beside_zero() -> None:
    """It is relative to nothing."""
    verdict = make_verdict(rel_err=math.inf, verdict=Outcome.DIVERGED)
    assert error_text(verdict) == "infinite: in the reference it is zero"


def test_changed_code_that_is_looked_at():
    """It is not said to have run elsewhere."""
    functions = [ChangedFunction("a.py", name, 3, Execution.ELSEWHERE) for name in ("f", "g")]
    verdict = make_verdict(verdict=Outcome.DIVERGED)
    culprit = culprit_of(verdict, "", "", places=(Place("a.py", 3, "g", Clue.CHANGED),))
    summary = make_summary([verdict], (culprit,))
    summary = dataclasses.replace(summary, changed_code=ChangedCode("v1", (*functions,)))
    assert changed_texts(summary) == ["changed since v1, and ran elsewhere in the job: a.py:3 (f)"]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({}, "1 device"),
        ({"pp": 2, "vpp": 2, "world_size": 2}, "pp 2, vpp 2, 2 ranks"),
        (
            {"tp": 2, "ep": 2, "dp": 4, "edp": 2, "world_size": 8},
            "tp 2 × dp 4, experts ep 2 × edp 2, 8 ranks",
        ),
    ],
)
def test_the_sizes_of_a_layout(sizes, text):
    """Those that are multiplied give the number of ranks."""
    assert layout_text(sizes) == text
