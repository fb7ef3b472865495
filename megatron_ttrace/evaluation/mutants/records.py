# SPDX-License-Identifier: Apache-2.0
"""What the steps of a campaign hand to each other."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Where a piece of source stands; as in ``ast``, lines from 1, columns in bytes from 0."""

    first_line: int
    first_column: int
    last_line: int
    last_column: int


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """One single fault.

    Attributes:
        id: stays the same while the changed statement does, wherever in its function it moves.
        module: that holds it, e.g. ``megatron.core.tensor_parallel.mappings``.
        qualname: of the outermost function around it.
        operator: what kind of fault.
        span: what is replaced.
        fragment: the text that stands there.
        replacement: the text that comes there.
    """

    id: str
    module: str
    qualname: str
    operator: str
    span: Span
    fragment: str
    replacement: str

    @property
    def package(self) -> str:
        """The part of Megatron it is in: what the module's name has after ``megatron.core``."""
        words = self.module.split(".")[2:]
        return ".".join(words[:2] if words[:1] == ["transformer"] else words[:1])

    @property
    def lines(self) -> range:
        """The lines it changes."""
        return range(self.span.first_line, self.span.last_line + 1)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "id": self.id,
            "module": self.module,
            "qualname": self.qualname,
            "operator": self.operator,
            "line": self.span.first_line,
            "fragment": self.fragment,
            "replacement": self.replacement,
        }


class Fate(StrEnum):
    """What became of a mutant in one layout, or in all that were tried."""

    DIVERGED = "diverged"
    """The check named a culprit: killed, and nothing else would have shown it."""
    CRASHED = "crashed"
    """The run, or the check of it, ended with an error: killed, but anyone would have noticed."""
    HUNG = "hung"
    """The run did not end in time: likewise."""
    SURVIVED = "survived"
    """Found equivalent to the reference."""

    @property
    def killed(self) -> bool:
        """Whether the fault came to light."""
        return self is not Fate.SURVIVED


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One mutant in one layout.

    Attributes:
        layout: name of the layout.
        fate: what became of it.
        seconds: of the whole check.
        told: the first culprit, or the error.
    """

    layout: str
    fate: Fate
    seconds: float
    told: str = ""


class Explanation(StrEnum):
    """Why a mutant survives."""

    EQUIVALENT = "equivalent"
    """Proven: no number of a training step depends on what was changed, in any configuration."""
    DORMANT = "dormant"
    """Proven: likewise in every job of the campaign. A fault, but what wakes it is not there."""
    UNSEEN = "unseen"
    """A hole: the fault is real and the check does not see it."""


HARMLESS = (Explanation.EQUIVALENT, Explanation.DORMANT)
"""What there is nothing to find of."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One mutant after its trials; ``explanation`` and ``why`` stand in survivors.toml."""

    mutant: Mutant
    trials: tuple[Trial, ...]
    explanation: Explanation | None = None
    why: str = ""

    @property
    def fate(self) -> Fate:
        """The last trial's: trials end with the first that kills."""
        return self.trials[-1].fate

    @property
    def column(self) -> str:
        """Where it is counted: its fate, or why it survived if that is not the checker's fault."""
        if self.fate.killed or self.explanation in (None, Explanation.UNSEEN):
            return self.fate.value
        return str(self.explanation)

    @property
    def disproved(self) -> bool:
        """Whether the check found what should not be there to be found."""
        return self.fate is Fate.DIVERGED and self.explanation in HARMLESS

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            **self.mutant.to_json(),
            "fate": self.fate.value,
            "explanation": self.explanation.value if self.explanation else None,
            "why": self.why,
            "trials": [
                {**dataclasses.asdict(trial), "fate": trial.fate.value} for trial in self.trials
            ],
        }
