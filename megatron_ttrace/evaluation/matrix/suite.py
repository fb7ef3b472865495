# SPDX-License-Identifier: Apache-2.0
"""Check configurations of the matrix: healthy ones must come out equivalent."""

import dataclasses
from collections.abc import Iterator, Sequence

from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.matrix.configurations import Configuration
from megatron_ttrace.saved.runner import Ended, Runner
from megatron_ttrace.trace.errors import ExitCode
from megatron_ttrace.trace.records import Outcome, Result
from megatron_ttrace.trace.sanitise import in_one_line


@dataclasses.dataclass(frozen=True)
class MatrixRow:
    """The result of one configuration.

    ``exact`` of its tensors must be bitwise equal, ``inexact`` of these are not.
    """

    name: str
    verdict: Result
    tensors: int = 0
    unchecked: int = 0
    worst_margin: float = 0.0
    worst: str = ""
    seconds: float = 0.0
    why: str = ""
    exact: int = 0
    inexact: int = 0
    finding: str = ""


def check(
    chosen: Sequence[Configuration], seeds: Sequence[int], runner: Runner
) -> Iterator[MatrixRow]:
    """Check configurations with each seed, which is part of their name if there are several."""
    runs = [(configuration, seed) for seed in seeds for configuration in chosen]
    names = [f"{run.name}/seed{seed}" if len(seeds) > 1 else run.name for run, seed in runs]
    cases = [
        configuration.case(runner.directory, name, ("--seed", str(seed)))
        for name, (configuration, seed) in zip(names, runs, strict=True)
    ]
    for name, (configuration, _), ended in zip(names, runs, runner.run_all(cases), strict=True):
        yield _row(name, configuration.finding, ended)


def _row(name: str, finding: str, ended: Ended) -> MatrixRow:
    if ended.checked is None:
        why = in_one_line(ended.reason)
        return MatrixRow(name, Result.COULD_NOT_CHECK, seconds=ended.seconds, why=why)
    summary, verdicts = ended.checked.summary, ended.checked.verdicts()
    worst = max(verdicts, key=suites.margin_of)
    return MatrixRow(
        name=name,
        verdict=summary.verdict,
        tensors=len(verdicts),
        unchecked=sum(verdict.verdict is Outcome.UNCHECKED for verdict in verdicts),
        worst_margin=suites.margin_of(worst),
        worst=f"{worst.name} {worst.kind}.{worst.index}",
        seconds=ended.seconds,
        why=suites.culprits_of(summary),
        finding=finding,
        exact=summary.exactness.expected if summary.exactness else 0,
        inexact=summary.exactness.lost if summary.exactness else 0,
    )


def exit_code(rows: Sequence[MatrixRow]) -> ExitCode:
    """1 if a healthy configuration diverged, else 2 if one is not as expected."""
    alarm = any(row.verdict is Result.DIVERGED and not row.finding for row in rows)
    expected = {True: Result.DIVERGED, False: Result.EQUIVALENT}
    met = all(row.verdict is expected[bool(row.finding)] for row in rows)
    return suites.exit_code(alarm=alarm, met=met)
