# SPDX-License-Identifier: Apache-2.0
"""Cases of a night from the JSON that the commands print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ttrace.evaluation.nightly.records import NightCase, NightPart, State

Json = Mapping[str, Any]


def known_bug(row: Json) -> NightCase:
    """A row of ``ttrace bugs run --rows``: a bug in one layout."""
    reached = ("detected", "localised", "explained")
    if row["healthy"] is False:
        state = State.ALARM
    elif row["met"]:
        state = State.GOOD
    else:
        state = State.BROKEN if row["detected"] is None else State.MISSED
    culprits = row["culprits"]
    explanation = culprits[0]["explanation"] if culprits else ""
    return NightCase(
        part=NightPart.BUGS,
        name=f"{row['id']} {row['name']} [{row['layout']}]",
        state=state,
        margin=_number(row["margin"]),
        seconds=row["seconds"],
        marks=", ".join(mark for mark in reached if row[mark]),
        note=row["problem"] or explanation,
    )


def configuration(row: Json) -> NightCase:
    """A row of ``ttrace matrix --json``: a healthy job, or one with a proven fault of Megatron.

    Such a fault must be found, like a known bug. Its margin is left out: it is not a healthy one.
    """
    finding = row.get("finding", "")
    diverged = row["verdict"] == "diverged"
    if row["verdict"] not in ("equivalent", "diverged"):
        state = State.BROKEN
    elif diverged == bool(finding):
        state = State.GOOD
    else:
        state = State.ALARM if diverged else State.MISSED
    note = row["why"] or (f"worst is {row['worst']}" if row["worst"] else "")
    if finding:
        said = "as in docs/findings.md" if diverged else "no longer present, see docs/findings.md"
        note = f"{finding}: {said}; {note}"
    return NightCase(
        part=NightPart.MATRIX,
        name=row["name"],
        state=state,
        margin=None if finding or state is State.BROKEN else _number(row["worst_margin"]),
        seconds=row["seconds"],
        marks=f"{row['tensors']} tensors, {row['unchecked']} unchecked",
        note=note,
    )


def planted(row: Json) -> NightCase:
    """A row of ``ttrace plant --json``: errors of one shape and size in one job."""
    size = "of its own size" if row["size"] is None else f"of {row['size']:g} tolerances"
    return NightCase(
        part=NightPart.PLANTED,
        name=f"{row['job']}: {row['shape']} {size}",
        state=State.GOOD if row["met"] else State.MISSED,
        marks=f"{row['found']:.1%} found, right rank {row['right_rank']:.1%}",
    )


_SCORES = {
    "mutation score": "score",
    "silent mutants killed": "silent_score",
    "with inert ones": "with_inert",
    "right module": "right_module",
    "cause told": "cause_told",
    "cause true": "cause_true",
    "causes wrong": "wrong",
    "mutants": "run",
}
"""Of a night, and what they are called in the file that ``ttrace mutants run`` writes."""


def mutants(report: Json) -> tuple[list[NightCase], dict[str, float]]:
    """The file that ``ttrace mutants run --json FILE`` writes: cases, and the scores.

    A fault that survives is missed, explained or not, unless it has no effect in any of the jobs.
    So is one that is explained wrongly, and each score below its bar.
    """
    cases = [_mutant(row) for row in report["mutants"]]
    cases += [
        NightCase(
            NightPart.MUTANTS, name, State.MISSED, note=f"{report[field]:.1%}, the bar is {bar:.0%}"
        )
        for name, field in _SCORES.items()
        if report[field] < (bar := report["bars"].get(field, 0))
    ]
    cases += [
        NightCase(NightPart.MUTANTS, name, State.BROKEN, note=f"without a mutant: {why}")
        for name, why in report["unhealthy"].items()
    ]
    scores = {name: float(report[field]) for name, field in _SCORES.items()}
    scores["mutants seed"] = float(*report["seeds"])
    return cases, scores


def _mutant(row: Json) -> NightCase:
    explanation, fate = row["explanation"], row["fate"]
    told = row["trials"][-1]["told"]
    harmless = explanation == "equivalent"
    marks, state = [fate], State.GOOD
    if explanation:
        marks.append(explanation)
    if fate == "survived":
        state = State.GOOD if harmless or row["inert"] else State.MISSED
        idle = "no job trains differently with it" if row["inert"] else ""
        told = row["why"] or idle or "survives without an explanation"
    elif fate == "diverged" and harmless:
        state = State.ALARM
        told = f"is listed as equivalent ({row['why']}), but was found: {told}"
    elif fate == "diverged":
        marks += ["wrong module"] * (not row["right_module"])
        if row["cause_true"] is False:
            marks.append("wrong cause")
            state = State.MISSED
    return NightCase(
        part=NightPart.MUTANTS,
        name=row["id"],
        state=state,
        seconds=sum(trial["seconds"] for trial in row["trials"]),
        marks=", ".join(marks),
        note=told,
    )


def _number(value: Any) -> float | None:
    """Infinities are strings in JSON."""
    return None if value is None else float(value)
