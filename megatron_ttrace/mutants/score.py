# SPDX-License-Identifier: Apache-2.0
"""What a campaign comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_ttrace.mutants.records import Fate, Row

BAR = 0.95
"""The least share of mutants that must be killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Counts of mutants.

    Attributes:
        diverged, crashed, hung: killed, by how.
        equivalent: survived and proven to be no fault.
        survived: the others.
    """

    diverged: int
    crashed: int
    hung: int
    equivalent: int
    survived: int

    @property
    def killed(self) -> int:
        """However."""
        return self.diverged + self.crashed + self.hung

    @property
    def score(self) -> float:
        """Killed of all that are faults; 1 when there are none."""
        return _share(self.killed, self.survived)

    @property
    def silent_score(self) -> float:
        """The same without those that crash or hang, which nobody needs a checker for."""
        return _share(self.diverged, self.survived)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            **dataclasses.asdict(self),
            "killed": self.killed,
            "score": round(self.score, 4),
            "silent_score": round(self.silent_score, 4),
        }


def score(rows: Iterable[Row]) -> Score:
    """Count."""
    all_rows = list(rows)
    fates = [row.fate for row in all_rows]
    equivalent = sum(row.equivalent for row in all_rows)
    return Score(
        diverged=fates.count(Fate.DIVERGED),
        crashed=fates.count(Fate.CRASHED),
        hung=fates.count(Fate.HUNG),
        equivalent=equivalent,
        survived=fates.count(Fate.SURVIVED) - equivalent,
    )


def passes(rows: Sequence[Row]) -> bool:
    """Whether the bar is met and no proof of equivalence is disproved."""
    return score(rows).score >= BAR and not any(row.disproved for row in rows)


def _share(killed: int, survived: int) -> float:
    return killed / (killed + survived) if killed + survived else 1.0
