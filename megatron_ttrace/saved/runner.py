# SPDX-License-Identifier: Apache-2.0
"""Run checks of small jobs, for everything that evaluates the checker.

Without a GPU, Megatron is imported once, and ranks are forks of this process or, where several jobs
run at a time, of its forks. Cases in one directory share references.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace import report
from megatron_ttrace.jobs import fingerprint, provenance
from megatron_ttrace.jobs import job as jobs
from megatron_ttrace.jobs.processes import forkserver, signals, tether
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.jobs.settings import Settings, split
from megatron_ttrace.trace import files
from megatron_ttrace.trace.budget import host_room
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Result, Summary, Verdict

NO_WANDB = "--ttrace-no-wandb"
_MOST_AT_A_TIME = 8
_JOB_BYTES = 2 << 30
"""What the ranks of a small job need, generously."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a case ended: with an answer, or the reason why there is none."""

    case: Case
    seconds: float
    checked: Checked | None = None
    reason: str = ""


class Runner:
    """Runs cases in one directory."""

    def __init__(
        self,
        directory: Path,
        *,
        flags: tuple[str, ...] = (NO_WANDB,),
        script: Path | None = None,
    ) -> None:
        """Import Megatron, if ranks can be forked: that of ``script``, by default our own."""
        self.directory = directory
        self._flags = flags
        self.script = script or launch_dir() / "pretrain_gpt.py"
        self._environment = {"TTRACE_CACHE": str((directory / "references").resolve())}
        self._device = split(flags)[0].device
        self.forks = jobs.prepare(self._device, self.script)
        if self.forks:
            # What all cases need, once for them.
            report.prepare(wandb=False)
            fingerprint.code(self.script)

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
        summary = jobs.settled(job, fork=self.forks, say=say)
        if summary.verdict is Result.COULD_NOT_CHECK:
            raise TTraceError(summary.reason)
        return Checked(job, summary)

    def run_all(self, cases: Sequence[Case]) -> Iterator[Ended]:
        """Run cases to their ends, several at a time, and say how each ended, in their order."""
        return self.each(self._end_of, cases)

    def each[Item, Result](
        self, work: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[Result]:
        """``map(work, items)`` for work that runs jobs.

        On a CPU as much is done at a time as there are cores, in forks of this process: ranks
        mostly wait for the reference, or for each other. Raises ``TTraceError`` when a fork was
        killed.
        """
        workers = 1
        if self.forks and forkserver.needs_cpu(self._device):
            room = host_room(1) // _JOB_BYTES
            workers = min(len(os.sched_getaffinity(0)), room, len(items), _MOST_AT_A_TIME)
        if workers <= 1:
            yield from map(work, items)
            return
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool

        context = multiprocessing.get_context("fork")
        # All workers are forks of this thread, before the pool starts threads of its own. A signal
        # must not wait for them: the kernel ends them with this process.
        begin = functools.partial(_begin_worker, os.getpid(), lambda number: work(items[number]))
        with signals.abrupt(), ProcessPoolExecutor(workers, context, begin) as pool:
            try:
                yield from pool.map(_worker_of, range(len(items)))
            except BrokenProcessPool as error:
                raise TTraceError("a process that runs the jobs was killed: run again") from error

    def _end_of(self, case: Case) -> Ended:
        began = time.monotonic()
        try:
            checked = self.run(case)
        except TTraceError as error:
            return Ended(case, time.monotonic() - began, reason=str(error))
        return Ended(case, time.monotonic() - began, checked)


_work: Callable[[int], Any]
"""In a worker: what it does with the item of a number."""


def _begin_worker(parent: int, work: Callable[[int], Any]) -> None:
    """The kernel ends this worker, and its ranks, with ``parent``."""
    global _work
    _work = work
    tether.die_with(parent)
    signals.ignore()


def _worker_of(number: int) -> Any:
    return _work(number)
