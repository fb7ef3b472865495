# SPDX-License-Identifier: Apache-2.0
"""How the rules fare over sick and healthy runs: misses and false alarms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.evaluation.baselines.rules import RULES, Job
from megatron_ttrace.evaluation.baselines.statistics import of_saved
from megatron_ttrace.report import files
from megatron_ttrace.trace.records import Outcome, TraceKey, Verdict
from megatron_ttrace.trace.store import TraceReader

OURS = "ttrace"
_UNMATCHED = (Outcome.MISSING, Outcome.EXTRA, Outcome.SHAPE)


@dataclasses.dataclass(frozen=True, slots=True)
class Flagged:
    """What each rule calls different in one run; ``compared`` tensors were given to all rules."""

    compared: int
    by_rule: dict[str, frozenset[TraceKey]]


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A job with a known bug, and the same job without it.

    ``culprit`` are the tensors where the bug is born, as the bug's description has them.
    """

    name: str
    healthy: Flagged
    sick: Flagged
    culprit: frozenset[TraceKey]

    def found(self, rule: str) -> bool:
        """Whether the rule flags anything that it does not flag without the bug."""
        return bool(self.sick.by_rule[rule] - self.healthy.by_rule[rule])

    def located(self, rule: str) -> bool:
        """Whether it flags, of what it does not flag without the bug, a tensor of the culprit."""
        return bool((self.sick.by_rule[rule] - self.healthy.by_rule[rule]) & self.culprit)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One rule over everything."""

    rule: str
    missed: tuple[str, ...]
    unlocated: tuple[str, ...]
    alarmed: tuple[str, ...]
    false_tensors: int

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return dataclasses.asdict(self)


def apply(directory: Path) -> Flagged:
    """All rules on a finished check whose candidate was saved, ours by its verdicts.

    Tensors that both runs have in one shape, floating-point ones, are given to all rules. What one
    side lacks or has in another shape counts as flagged by all of them: every tool that puts
    shards together notices that.

    Raises:
        TTraceError: when a trace or the report is missing or damaged.
    """
    reference = TraceReader(directory / "reference")
    candidate = TraceReader(directory / "candidate")
    summary, verdicts = files.load_report(directory)
    job = Job(RunConfig.from_json(summary.config).layers, float(reference.meta["epsilon"]))
    flagged: dict[str, set[TraceKey]] = {rule.name: set() for rule in RULES}
    compared = set()
    for key, stats in of_saved(reference, candidate):
        compared.add(key)
        for rule in RULES:
            if rule.flags(key, stats, job):
                flagged[rule.name].add(key)
    flagged[OURS] = _failures(verdicts) & compared
    for keys in flagged.values():
        keys |= {verdict.key for verdict in verdicts if verdict.verdict in _UNMATCHED}
    return Flagged(len(compared), {name: frozenset(keys) for name, keys in flagged.items()})


def _failures(verdicts: Iterable[Verdict]) -> set[TraceKey]:
    return {verdict.key for verdict in verdicts if verdict.verdict.is_failure}


def lines(cases: Sequence[Pair], healthy: dict[str, Flagged]) -> list[Line]:
    """The table: a line for each rule, ours last."""
    return [
        Line(
            rule=rule,
            missed=tuple(case.name for case in cases if not case.found(rule)),
            unlocated=tuple(case.name for case in cases if not case.located(rule)),
            alarmed=tuple(name for name, flagged in healthy.items() if flagged.by_rule[rule]),
            false_tensors=sum(len(flagged.by_rule[rule]) for flagged in healthy.values()),
        )
        for rule in (*(rule.name for rule in RULES), OURS)
    ]
