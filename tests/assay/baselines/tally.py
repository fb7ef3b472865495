# SPDX-License-Identifier: Apache-2.0
"""Apply the rules to finished runs, and count misses and false alarms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.trace import files
from megatron_ttrace.trace.records import Outcome, TraceKey
from megatron_ttrace.trace.store import TraceReader
from tests.assay.baselines.rules import RULES, RunFacts
from tests.assay.baselines.statistics import of_saved

OURS = "ttrace"
_UNMATCHED = (Outcome.MISSING, Outcome.EXTRA, Outcome.SHAPE)


@dataclasses.dataclass(frozen=True, slots=True)
class Flagged:
    """What each rule flags in one run; all rules are given the same ``compared`` tensors."""

    compared: int
    by_rule: dict[str, frozenset[TraceKey]]


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A job with a known bug, and the same job without it.

    ``culprit`` are the tensors in which the bug starts, according to its description.
    """

    name: str
    healthy: Flagged
    faulty: Flagged
    culprit: frozenset[TraceKey]

    def new(self, rule: str) -> frozenset[TraceKey]:
        """The tensors that the rule flags with the bug only."""
        return self.faulty.by_rule[rule] - self.healthy.by_rule[rule]


@dataclasses.dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule over all runs.

    Attributes:
        rule: its name.
        missed: pairs in which it flags nothing new.
        unlocated: pairs in which it flags no new tensor of the culprit.
        alarmed: healthy runs in which it flags a tensor.
        false_tensors: how many tensors it flags in healthy runs.
    """

    rule: str
    missed: tuple[str, ...]
    unlocated: tuple[str, ...]
    alarmed: tuple[str, ...]
    false_tensors: int


def apply(directory: Path) -> Flagged:
    """Apply all rules to a finished check whose candidate was saved; ours is its verdicts.

    All rules get the floating-point tensors that both runs have in one shape. A tensor that one run
    lacks or has in another shape counts as flagged by all rules, because every tool that merges
    shards notices that.

    Raises:
        TTraceError: when a trace or the report is missing or damaged.
    """
    reference = TraceReader(directory / "reference")
    candidate = TraceReader(directory / "candidate")
    summary, verdicts = files.load_report(directory)
    facts = RunFacts(RunConfig.from_json(summary.config).layers, float(reference.meta["epsilon"]))
    flagged: dict[str, set[TraceKey]] = {rule.name: set() for rule in RULES}
    compared = set()
    for key, stats in of_saved(reference, candidate):
        compared.add(key)
        for rule in RULES:
            if rule.flags(key, stats, facts):
                flagged[rule.name].add(key)
    flagged[OURS] = {v.key for v in verdicts if v.verdict.is_failure} & compared
    unmatched = {v.key for v in verdicts if v.verdict in _UNMATCHED}
    return Flagged(len(compared), {name: frozenset(k | unmatched) for name, k in flagged.items()})


def rule_rows(cases: Sequence[Pair], healthy: dict[str, Flagged]) -> list[RuleRow]:
    """One row per rule, ours last."""
    return [
        RuleRow(
            rule=rule,
            missed=tuple(case.name for case in cases if not case.new(rule)),
            unlocated=tuple(case.name for case in cases if not case.new(rule) & case.culprit),
            alarmed=tuple(name for name, flagged in healthy.items() if flagged.by_rule[rule]),
            false_tensors=sum(len(flagged.by_rule[rule]) for flagged in healthy.values()),
        )
        for rule in (*(rule.name for rule in RULES), OURS)
    ]
