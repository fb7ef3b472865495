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


def mutants(report: Json) -> tuple[list[NightCase], dict[str, float]]:
    """The file that ``ttrace mutants run --json FILE`` writes: cases, and the scores.

    A survivor without an explanation is a fault that was missed. So is a score below the bar, even
    if every survivor is explained.
    """
    cases = [_mutant(row) for row in report["mutants"]]
    if not report["passed"]:
        said = f"{report['score']:.1%} of {report['run']} killed, the bar is {report['bar']:.0%}"
        cases.append(NightCase(NightPart.MUTANTS, "score", State.MISSED, note=said))
    scores = {
        "mutation score": float(report["score"]),
        "mutation score, silent ones": float(report["silent_score"]),
        "mutants": float(report["run"]),
    }
    return cases, scores


def _mutant(row: Json) -> NightCase:
    survived, explanation = row["fate"] == "survived", row["explanation"]
    told = row["trials"][-1]["told"] if row["trials"] else ""
    if survived:
        state = State.GOOD if explanation else State.MISSED
        told = row["why"] or "survives without an explanation"
    elif explanation == "equivalent" and row["fate"] == "diverged":
        state = State.ALARM
        told = f"is listed as harmless ({row['why']}), but was found: {told}"
    else:
        state = State.GOOD
    return NightCase(
        part=NightPart.MUTANTS,
        name=row["id"],
        state=state,
        seconds=sum(trial["seconds"] for trial in row["trials"]),
        marks=f"{row['fate']}, {explanation}" if explanation else row["fate"],
        note=told,
    )


def _number(value: Any) -> float | None:
    """Infinities are strings in JSON."""
    return None if value is None else float(value)
