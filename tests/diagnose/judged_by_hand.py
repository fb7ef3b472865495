# SPDX-License-Identifier: Apache-2.0
"""Verdicts that no run made, and their culprits as reports show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ttrace.diagnose import culprits
from megatron_ttrace.report.explanations import culprit_of
from megatron_ttrace.trace.findings import Explanation
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.outcomes import Grounds
from megatron_ttrace.trace.records import STEP_LEVEL, Culprit, Kind, Outcome

ACTIVATIONS = (Kind.TOKENS, Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)


def judged(kind: Kind, name: str, outcome: Outcome = Outcome.PASS, **more: Any) -> Judged:
    """A verdict of rank 0 in iteration 1; ``error`` is in units of the tolerance ``tolerance``."""
    tolerance, margin = more.pop("tolerance", 1.0), more.pop("margin", None)
    error = None if margin is None else margin * tolerance
    known = {
        "iteration": 1,
        "microbatch": STEP_LEVEL,
        "index": 0,
        "rel_err": error,
        "rel_err_eps": error,
        "tolerance": None if margin is None else tolerance,
        "margin": margin,
        "ranks": (0,),
        "placement": "Replicate",
        "shape": (2,),
    }
    return Judged(kind=kind, name=name, verdict=outcome, **(known | more))


def diagnosed(failure: Judged, why: Explanation, **more: Any) -> Diagnosis:
    """A failure with what is known of its cause; why it is a culprit does not matter."""
    known = {"name": failure.name, "direction": failure.direction, "grounds": Grounds.FIRST_FAILURE}
    return Diagnosis(verdict=failure, why=why, **(known | more))


def localise(verdicts: Sequence[Judged], *explain: Any, isolated: bool = False) -> list[Culprit]:
    """The culprits, in words."""
    return [
        culprit_of(diagnosis)
        for diagnosis in culprits.localise(verdicts, *explain, isolated=isolated)
    ]


def verdict(
    name: str,
    kind: Kind = Kind.OUTPUT,
    outcome: Outcome = Outcome.PASS,
    *,
    margin: float | None = 0.1,
    **place: Any,
) -> Judged:
    """A verdict with a margin; of an activation, in microbatch 0."""
    place.setdefault("microbatch", 0 if kind in ACTIVATIONS else STEP_LEVEL)
    return judged(kind, name, outcome, margin=margin, **place)
