# SPDX-License-Identifier: Apache-2.0
"""Run known bugs and healthy configurations with all tensors saved, and apply the rules."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.evaluation.bugs import suite
from megatron_ttrace.evaluation.bugs.catalogue import Bug
from megatron_ttrace.evaluation.matrix.configurations import Configuration
from megatron_ttrace.saved.runner import NO_WANDB, Runner
from megatron_ttrace.trace import files
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Summary, TraceKey
from tests.assay.baselines.tally import Flagged, Pair, apply

_SAVE = "--ttrace-save-candidate"


@dataclasses.dataclass
class Collected:
    """The results of all runs; ``problems`` are cases that could not be run."""

    cases: list[Pair] = dataclasses.field(default_factory=list)
    healthy: dict[str, Flagged] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def compared(self) -> int:
        """Tensors of the healthy runs."""
        return sum(flagged.compared for flagged in self.healthy.values())


def bugs(
    chosen: Sequence[Bug],
    variant: suite.Variant,
    directory: Path,
    say: Callable[[str], None],
    found: Collected,
) -> None:
    """Run every bug's jobs with and without it; healthy runs that bugs share count once."""
    variant = dataclasses.replace(variant, flags=(*variant.flags, _SAVE))
    known: dict[Path, Flagged] = {}
    for number, row in enumerate(suite.run(chosen, variant, directory, say)):
        name = f"{row.bug.id}/{'bf16' if variant.bf16 else 'fp32'}/{number}"
        if row.healthy is None or row.faulty is None:
            found.problems.append(f"{name}: {row.error}")
            continue
        at = _directory_of(row.healthy)
        if at not in known:
            known[at] = apply(at)
            found.healthy[f"{name} without the bug"] = known[at]
        faulty = _directory_of(row.faulty)
        found.cases.append(Pair(name, known[at], apply(faulty), _culprit(row.bug, faulty)))
        shutil.rmtree(faulty / "candidate", ignore_errors=True)


def matrix(
    chosen: Sequence[Configuration], directory: Path, say: Callable[[str], None], found: Collected
) -> None:
    """Run healthy configurations."""
    runner = Runner(directory, flags=(NO_WANDB, _SAVE))
    for one in chosen:
        say(one.name)
        case = one.case(directory)
        try:
            runner.run(case)
            found.healthy[one.name] = apply(directory / case.name)
        except TTraceError as error:
            found.problems.append(f"{one.name}: {error}")
        shutil.rmtree(directory / case.name / "candidate", ignore_errors=True)


def _directory_of(summary: Summary) -> Path:
    """The ``--ttrace-dir`` of a finished check."""
    return Path(RunConfig.from_json(summary.config).reference).parent


def _culprit(bug: Bug, directory: Path) -> frozenset[TraceKey]:
    """The tensors in which the bug starts: of the expected module (or its parameters)."""
    wanted = bug.expected
    return frozenset(
        verdict.key
        for verdict in files.load_report(directory)[1]
        if verdict.kind is wanted.kind
        and wanted.index in (None, verdict.index)
        and any(
            fnmatchcase(name, wanted.module)
            for name in (verdict.name, verdict.name.rpartition(".")[0])
        )
    )
