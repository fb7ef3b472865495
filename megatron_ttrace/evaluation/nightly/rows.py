# SPDX-License-Identifier: Apache-2.0
"""Cases of a night from the JSON that the commands print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ttrace.evaluation.nightly.records import NightCase, NightPart, State

Json = Mapping[str, Any]


def known_bug(row: Json) -> NightCase:
    """A row of ``ttrace eval bugs run --rows``: a bug in one layout."""
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
    """A row of ``ttrace eval matrix --json``: healthy, or with a proven fault of Megatron.

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


def recipe(row: Json) -> NightCase:
    """A line of the ``jobs.jsonl`` of ``ttrace recipes``: the small job of some recipes.

    A job that Megatron refuses has no numbers to compare, and is as it should be.
    """
    states = {
        "equivalent": State.GOOD,
        "refused by Megatron": State.GOOD,
        "diverged": State.GOOD if row["finding"] else State.ALARM,
    }
    return NightCase(
        part=NightPart.RECIPES,
        name=row["key"],
        state=states.get(row["answer"], State.BROKEN),
        seconds=row["seconds"],
        marks=f"{row['tensors']} tensors, {row['unchecked']} unchecked",
        note="; ".join(filter(None, (row["finding"], row["why"]))),
    )


def _number(value: Any) -> float | None:
    """Infinities are strings in JSON."""
    return None if value is None else float(value)
