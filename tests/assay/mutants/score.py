# SPDX-License-Identifier: Apache-2.0
"""The score of a campaign."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_ttrace.evaluation.bugs.expect import SHARES, Looked, looked
from tests.assay.mutants import truth
from tests.assay.mutants.records import Fate, MutantRow

BARS = {
    "silent_score": 0.95,
    "right_module": 0.9,
    "cause_told": 0.6,
    "cause_true": 0.95,
    **{f"{name}_share": share for name, share in SHARES.items()},
}
"""The least shares of a good checker, by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Counts of mutants.

    Attributes:
        diverged: killed by the check.
        crashed, hung: killed, and visible without a check.
        equivalent: survived, and proven not to be a fault.
        inert: survived, and without effect on training in any job that runs its line.
        survived: the others.
        right: of the diverged ones, those whose culprit is the right module.
        true, wrong: of the diverged ones, those whose cause was told, truly or not.
        file_first, function_first: of the diverged ones, those whose first place to look at is in
            the changed file, or is the changed function.
        file_in_three, function_in_three: the same for any of the first three places.
    """

    diverged: int
    crashed: int
    hung: int
    equivalent: int
    inert: int
    survived: int
    right: int
    true: int
    wrong: int
    file_first: int
    function_first: int
    file_in_three: int
    function_in_three: int

    @property
    def killed(self) -> int:
        """By the check or without it."""
        return self.diverged + self.crashed + self.hung

    @property
    def shares(self) -> dict[str, float]:
        """By name; 1 of nothing.

        ``score``: killed of all that have an effect, ``silent_score`` of those that neither crash
        nor hang, ``with_inert`` of these and the inert ones; of the diverged ones ``right_module``
        and ``cause_told``; of those that are told ``cause_true``.
        """
        told = self.true + self.wrong
        return {
            "score": _share(self.killed, self.killed + self.survived),
            "silent_score": _share(self.diverged, self.diverged + self.survived),
            "with_inert": _share(self.diverged, self.diverged + self.survived + self.inert),
            "right_module": _share(self.right, self.diverged),
            "cause_told": _share(told, self.diverged),
            "cause_true": _share(self.true, told),
            **{f"{name}_share": _share(getattr(self, name), self.diverged) for name in SHARES},
        }

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        shares = {name: round(share, 4) for name, share in self.shares.items()}
        return {**dataclasses.asdict(self), "killed": self.killed, **shares}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


COLUMNS = tuple(field.name for field in dataclasses.fields(Score))


def columns(row: MutantRow) -> Iterable[str]:
    """What a row counts as."""
    yield row.column
    if row.fate is Fate.DIVERGED:
        if right_module(row):
            yield "right"
        cause = right_cause(row)
        if cause is not None:
            yield "true" if cause else "wrong"
        yield from (name for name, right in dataclasses.asdict(places(row)).items() if right)


def places(row: MutantRow) -> Looked:
    """Whether the places to look at are those of the mutant."""
    return looked(row.trials[-1].culprits, [(row.mutant.module, row.mutant.qualname)])


def right_module(row: MutantRow) -> bool | None:
    """Whether the culprit is the right module; ``None`` where the check did not diverge."""
    last = row.trials[-1]
    if row.fate is not Fate.DIVERGED:
        return None
    return truth.right_module(row.mutant, last.ran, last.culprits)


def right_cause(row: MutantRow) -> bool | None:
    """Whether the cause that is told is true; ``None`` if none is told."""
    return truth.right_cause(row.mutant, row.trials[-1].culprits)


def score(rows: Iterable[MutantRow]) -> Score:
    """Count."""
    counts = Counter(column for row in rows for column in columns(row))
    return Score(*(counts[column] for column in COLUMNS))


def passes(rows: Sequence[MutantRow]) -> bool:
    """Whether enough silent faults are found, and no explanation is disproved."""
    found = score(rows).shares["silent_score"]
    return found >= BARS["silent_score"] and not any(row.disproved for row in rows)


def to_json(row: MutantRow) -> dict[str, Any]:
    """A row with how its diagnosis is judged, for machines."""
    return {
        **row.to_json(),
        "right_module": right_module(row),
        "cause_true": right_cause(row),
        "looked": dataclasses.asdict(places(row)) if row.fate is Fate.DIVERGED else None,
    }
