# SPDX-License-Identifier: Apache-2.0
"""The score of a campaign."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_ttrace.evaluation.mutants.records import MutantRow

BAR = 0.95
"""The least share of mutants that must be killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Counts of mutants.

    Attributes:
        diverged: killed by the check.
        crashed, hung: killed, and visible without a check.
        equivalent: survived, and proven not to be a fault.
        dormant: survived, without effect in the jobs of the campaign; counts as missed.
        survived: the others.
    """

    diverged: int
    crashed: int
    hung: int
    equivalent: int
    dormant: int
    survived: int

    @property
    def killed(self) -> int:
        """By the check or without it."""
        return self.diverged + self.crashed + self.hung

    @property
    def score(self) -> float:
        """Killed of all that are not proven equivalent; 1 if there are none."""
        return self._share(self.killed)

    @property
    def silent_score(self) -> float:
        """The same of those that neither crash nor hang."""
        return self._share(self.diverged)

    def _share(self, killed: int) -> float:
        counted = killed + self.survived + self.dormant
        return killed / counted if counted else 1.0

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            **dataclasses.asdict(self),
            "killed": self.killed,
            "score": round(self.score, 4),
            "silent_score": round(self.silent_score, 4),
        }


COLUMNS = tuple(field.name for field in dataclasses.fields(Score))


def score(rows: Iterable[MutantRow]) -> Score:
    """Count."""
    counts = Counter(row.column for row in rows)
    return Score(*(counts[column] for column in COLUMNS))


def passes(rows: Sequence[MutantRow]) -> bool:
    """Whether the bar is met and no explanation is disproved."""
    return score(rows).score >= BAR and not any(row.disproved for row in rows)
