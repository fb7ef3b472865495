# SPDX-License-Identifier: Apache-2.0
"""What a night consists of, and its cases from the JSON that the commands print."""

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from megatron_ttrace.evaluation import suites
from megatron_ttrace.trace.errors import ExitCode

Json = Mapping[str, Any]


class NightPart(StrEnum):
    """What is run, in this order: the most important first, in case time runs out."""

    BUGS = "bugs"
    MATRIX = "matrix"
    RECIPES = "recipes"
    HUNT = "hunt"


class State(StrEnum):
    """The result of a case."""

    GOOD = "good"
    """A known bug was found at its place, or a healthy job or recipe is equivalent."""
    MISSED = "missed"
    """A known bug was not found, not where expected, or explained wrongly."""
    ALARM = "false alarm"
    """A healthy job or a recipe diverged."""
    BROKEN = "could not run"
    """There is no result."""


@dataclasses.dataclass(frozen=True, slots=True)
class NightCase:
    """One bug, healthy job, recipe's small job, or combination of options.

    Attributes:
        name: the same every night, e.g. ``04a dp-average-twice [DP]``.
        margin: of a bug the smallest of its culprits', of a healthy job the largest, or ``None``.
        marks: what was reached, e.g. ``detected, localised``.
        note: what is wrong, or the explanation in the report.
    """

    part: NightPart
    name: str
    state: State
    margin: float | None = None
    seconds: float = 0.0
    marks: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """A chosen part that is missing or incomplete."""

    part: NightPart
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Night:
    """All results of a night.

    Attributes:
        began: ISO 8601, with the offset to UTC.
        versions: of everything that can change a number.
        options: of the command, those that choose what is run.
        gaps: chosen parts that are missing or incomplete.
    """

    began: str
    seconds: float
    versions: dict[str, str]
    options: dict[str, str]
    cases: tuple[NightCase, ...] = ()
    gaps: tuple[Gap, ...] = ()

    @property
    def bad(self) -> tuple[NightCase, ...]:
        """Missed bugs and false alarms."""
        return tuple(case for case in self.cases if case.state in (State.MISSED, State.ALARM))

    @property
    def exit_code(self) -> ExitCode:
        """1 for a false alarm, else 2 for a missed bug or a case that could not be run."""
        good = bool(self.cases) and all(case.state is State.GOOD for case in self.cases)
        alarm = any(case.state is State.ALARM for case in self.cases)
        return suites.exit_code(alarm=alarm, met=good and not self.gaps)


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
        present = (
            "as in docs/findings.md" if diverged else "no longer present, see docs/findings.md"
        )
        note = f"{finding}: {present}; {note}"
    return NightCase(
        part=NightPart.MATRIX,
        name=row["name"],
        state=state,
        margin=None if finding or state is State.BROKEN else _number(row["worst_margin"]),
        seconds=row["seconds"],
        marks=f"{row['tensors']} tensors, {row['unchecked']} unchecked",
        note=note,
    )


def small_job(part: NightPart, row: Json) -> NightCase:
    """A line of the ``jobs.jsonl`` of ``ttrace recipes`` or ``ttrace hunt``.

    A job that Megatron refuses has no numbers to compare, and is as it should be; so is a
    combination of options that does not train.
    """
    states = {
        "equivalent": State.GOOD,
        "refused by Megatron": State.GOOD,
        "diverged": State.GOOD if row["finding"] else State.ALARM,
        "fails without ttrace too": State.GOOD if part is NightPart.HUNT else State.BROKEN,
    }
    return NightCase(
        part=part,
        name=row["key"],
        state=states.get(row["answer"], State.BROKEN),
        seconds=row["seconds"],
        marks=f"{row['tensors']} tensors, {row['unchecked']} unchecked",
        note="; ".join(filter(None, (row["finding"], row["why"]))),
    )


def _number(value: Any) -> float | None:
    """Infinities are strings in JSON."""
    return None if value is None else float(value)
