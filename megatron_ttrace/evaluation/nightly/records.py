# SPDX-License-Identifier: Apache-2.0
"""What a night consists of. Runner, history, page and W&B hand these to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum

from megatron_ttrace.errors import ExitCode


class Part(StrEnum):
    """What is run, in this order: what is most telling comes first, should time run out."""

    BUGS = "bugs"
    MATRIX = "matrix"
    MUTANTS = "mutants"


class State(StrEnum):
    """How a case came out."""

    GOOD = "good"
    """A known bug was found where it is; a healthy job was found equivalent; a mutant was killed,
    or is known to survive."""
    MISSED = "missed"
    """A known bug or a mutant was not found, or elsewhere, or explained otherwise than expected."""
    ALARM = "false alarm"
    """A healthy job was found diverged."""
    BROKEN = "could not run"
    """It has no result."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One line of a night.

    Attributes:
        part: what it belongs to.
        name: the same every night, e.g. ``04a dp-average-twice [DP]``.
        state: how it came out.
        margin: of a bug the weakest of its culprits', of a healthy job the worst; ``None`` without.
        seconds: that it took.
        marks: what was reached, e.g. ``detected, localised``.
        note: what is wrong, or the explanation that was given.
    """

    part: Part
    name: str
    state: State
    margin: float | None = None
    seconds: float = 0.0
    marks: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """A part that did not come to its end. ``by_choice``: it was switched off."""

    part: Part
    reason: str
    by_choice: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Night:
    """All that came out.

    Attributes:
        began: ISO 8601, with the offset to UTC.
        seconds: that all of it took.
        versions: of everything that can change a number.
        options: those of the command that choose what is run.
        cases: in the order in which they ran.
        gaps: parts that are missing, or not whole.
        scores: numbers of a whole part, e.g. ``mutation score``.
    """

    began: str
    seconds: float
    versions: Mapping[str, str]
    options: Mapping[str, str]
    cases: tuple[Case, ...]
    gaps: tuple[Gap, ...] = ()
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def bad(self) -> tuple[Case, ...]:
        """Missed bugs and false alarms."""
        return tuple(case for case in self.cases if case.state in (State.MISSED, State.ALARM))

    @property
    def exit_code(self) -> ExitCode:
        """1 for a false alarm, else 2 for a missed bug or what could not be run."""
        if any(case.state is State.ALARM for case in self.cases):
            return ExitCode.DIVERGED
        if any(case.state is not State.GOOD for case in self.cases):
            return ExitCode.COULD_NOT_CHECK
        if not self.cases or any(not gap.by_choice for gap in self.gaps):
            return ExitCode.COULD_NOT_CHECK
        return ExitCode.EQUIVALENT

    @property
    def is_good(self) -> bool:
        """Whether later nights may be held against it."""
        return self.exit_code is ExitCode.EQUIVALENT

    def count(self, part: Part, state: State) -> int:
        """How many cases of a part came out so."""
        return sum(case.part is part and case.state is state for case in self.cases)
