# SPDX-License-Identifier: Apache-2.0
"""Run checks of small jobs one after the other, for everything that evaluates the checker.

Without a GPU, Megatron is imported once and ranks are forks of this process. Cases in one directory
share references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_ttrace.jobs import job as jobs
from megatron_ttrace.jobs import provenance
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.jobs.settings import Settings, split
from megatron_ttrace.trace import files
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Result, Summary, Verdict

NO_WANDB = "--ttrace-no-wandb"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job to check, as ``jobs.job.Job`` describes it.

    Its directory is ``name`` below the runner's; without a ``script`` it runs the runner's.
    """

    name: str
    arguments: tuple[str, ...]
    nproc: int = 1
    flags: tuple[str, ...] = ()
    script: Path | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limit: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """A case that was run to its end."""

    job: jobs.Job
    summary: Summary

    def verdicts(self) -> list[Verdict]:
        """The verdicts in its report."""
        return files.load_report(self.job.directory)[1]


class Runner:
    """Runs cases in one directory."""

    def __init__(
        self,
        directory: Path,
        *,
        flags: tuple[str, ...] = (NO_WANDB,),
        script: Path | None = None,
    ) -> None:
        """Import Megatron, if ranks can be forked.

        Args:
            directory: of all cases, and of the references that they share.
            flags: ``--ttrace-*`` flags of all cases.
            script: of all cases that name none; by default our own ``pretrain_gpt.py``.
        """
        self.directory = directory
        self._flags = flags
        self.script = script or launch_dir() / "pretrain_gpt.py"
        self._environment = {"TTRACE_CACHE": str((directory / "references").resolve())}
        device = split(flags)[0].device
        self.forks = jobs.prepare(device, self.script)

    def job(self, case: Case) -> jobs.Job:
        """The job of a case.

        Raises:
            TTraceError: when one of its flags cannot have its value.
        """
        place = Settings(directory=self.directory / case.name)
        settings, arguments = split([*self._flags, *case.flags], place)
        return jobs.Job(
            script=case.script or self.script,
            arguments=(*case.arguments, *arguments),
            nproc=case.nproc,
            settings=settings,
            environment={**self._environment, **case.environment},
            limit=case.limit,
        )

    def run(self, case: Case, say: Callable[[str], None] = lambda line: None) -> Checked:
        """Run a case to its end; ``say`` is called with each line of progress.

        Raises:
            OutOfTimeError: when it took longer than its limit; its ranks are ended.
            TTraceError: when there is no answer, with the reason.
        """
        job = self.job(case)
        # The report names the command that repeats this check, not the one that runs many: a check
        # must not see which known bug or mutant is evaluated.
        command = {provenance.COMMAND: provenance.command_line(job.checking())}
        job = dataclasses.replace(job, environment={**job.environment, **command})
        summary = jobs.run(job, fork=self.forks, say=say)
        if summary.verdict is Result.COULD_NOT_CHECK:
            raise TTraceError(summary.reason)
        return Checked(job, summary)
