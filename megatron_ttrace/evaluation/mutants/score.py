# SPDX-License-Identifier: Apache-2.0
"""What a campaign comes to."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_ttrace.evaluation.mutants.records import Row

BAR = 0.95
"""The least share of mutants that must be killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Counts of mutants.

    Attributes:
        diverged: killed by the check.
        crashed, hung: killed, and nobody needs a checker for that.
        equivalent: survived and proven to be no fault.
        dormant: survived, for no job of the campaign wakes it; counts as missed.
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
        """However."""
        return self.diverged + self.crashed + self.hung

    @property
    def score(self) -> float:
        """Killed of all that are not proven equivalent; 1 when there are none."""
        return _share(self.killed, self._missed)

    @property
    def silent_score(self) -> float:
        """The same of those that neither crash nor hang."""
        return _share(self.diverged, self._missed)

    @property
    def _missed(self) -> int:
        return self.survived + self.dormant

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        shares = ("score", "silent_score")
        return {
            **dataclasses.asdict(self),
            "killed": self.killed,
            **{name: round(getattr(self, name), 4) for name in shares},
        }


COLUMNS = tuple(field.name for field in dataclasses.fields(Score))


def score(rows: Iterable[Row]) -> Score:
    """Count."""
    counts = Counter(row.column for row in rows)
    return Score(*(counts[column] for column in COLUMNS))


def passes(rows: Sequence[Row]) -> bool:
    """Whether the bar is met and no proof of equivalence is disproved."""
    return score(rows).score >= BAR and not any(row.disproved for row in rows)


def _share(killed: int, survived: int) -> float:
    return killed / (killed + survived) if killed + survived else 1.0
