# SPDX-License-Identifier: Apache-2.0
"""One check on this machine, from a command line to an answer."""

import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from megatron_ttrace.jobs import provenance
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.jobs.processes import forkserver, ranks, signals
from megatron_ttrace.jobs.processes.logs import (
    died_of,
    how_it_ended,
    last_lines,
    port_was_taken,
    record_of,
    unwritable,
)
from megatron_ttrace.jobs.processes.progress import OF_REFERENCE, Echo, Progress
from megatron_ttrace.jobs.processes.waiting import OutOfTimeError, Patience
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.jobs.settings import CHECK, Settings, checking
from megatron_ttrace.trace import owned, shared
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.records import Result, Summary

_MARGIN_SECONDS = 10.0
_UNBIDDEN = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)
"""Signals that no process sends itself when another rank is lost."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to check.

    ``arguments`` are the script's own, without ours; ``environment`` is added to each rank's. After
    ``limit`` seconds the job is ended (``--ttrace-timeout`` limits how long it may be silent).
    """

    script: Path
    arguments: tuple[str, ...]
    nproc: int
    settings: Settings
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    limit: float | None = None

    @property
    def directory(self) -> Path:
        """The ``--ttrace-dir``."""
        return self.settings.directory

    def checking(self) -> list[str]:
        """The command that checks this job, without values that may be secret."""
        words = checking(self.script, self.arguments, self.nproc, self.settings)
        return disclosure.command(["ttrace", *words])

    def isolating(self) -> list[str]:
        """The command that checks this job with modules isolated, in a directory of its own."""
        return self._isolated().checking()

    def isolated(self) -> Self:
        """This job with modules isolated, in a directory of its own and with the same reference."""
        job = self._isolated()
        reference = self.settings.reference or self.directory / "reference"
        settings = dataclasses.replace(job.settings, reference=reference)
        return dataclasses.replace(job, settings=settings)

    def alone(self) -> Self:
        """This job with modules isolated, and a reference whose replays are."""
        return self._isolated(self.directory)

    def _isolated(self, directory: Path | None = None) -> Self:
        directory = directory or Path(f"{self.directory}-isolated")
        settings = dataclasses.replace(self.settings, directory=directory, isolate=True)
        job = dataclasses.replace(self, settings=settings)
        command = provenance.command_line(job.checking())
        return dataclasses.replace(
            job, environment={**self.environment, provenance.COMMAND: command}
        )


def prepare(
    device: str = "auto", script: Path | None = None, *, arguments: Sequence[str] = ()
) -> bool:
    """Import Megatron into this process if ranks can be forked; returns whether they can.

    The Megatron is that of ``script``, by default our own ``pretrain_gpt.py``. If ``arguments`` are
    wrong, the ranks say so before they need all modules.
    """
    # Nothing needs to be cleaned up yet, and imports swallow Ctrl-C.
    with signals.abrupt():
        on_cpu = forkserver.needs_cpu(device)
        if not on_cpu and forkserver.imports_use_gpu():
            return False
        script = script or launch_dir() / "pretrain_gpt.py"
        try:
            forkserver.preload(script, arguments=arguments, on_cpu=on_cpu)
        except Exception:
            if on_cpu:
                raise
            return False  # a library for GPUs does not load: the ranks end with its error
        return on_cpu or forkserver.is_gpu_unused()


def run(job: Job, *, fork: bool, say: Callable[[str], None] = lambda line: None) -> Summary:
    """Run a check to its end; ``fork`` is what :func:`prepare` returned.

    Raises:
        OutOfTimeError: when it took longer than its limit; its ranks are ended.
        TTraceError: when there is no answer, with the reason.
    """
    scripts.require(job.script)
    with shared.claim(job.directory) as claim:
        if fork and (why := forkserver.refuses(job.script, job.environment)):
            say(f"{job.script} runs in fresh processes: {why}")
            fork = False
        began = time.monotonic()
        progress = Progress(say)
        progress(f"starting {job.nproc} rank{'s' if job.nproc > 1 else ''}")
        observed = _run_ranks(job, claim.run, fork, progress)
        summary = _believed(job.directory, claim.run, observed)
        timings = {**summary.timings, "wall": time.monotonic() - began}
        return dataclasses.replace(summary, timings=timings)


def settled(job: Job, *, fork: bool, say: Callable[[str], None] = lambda line: None) -> Summary:
    """:func:`run`, and once more with modules isolated if rounding in 16 bits left no answer."""
    summary = run(job, fork=fork, say=say)
    if job.settings.reference is None and summary.too_blind:
        say("rounding hides too much: checking once more, with modules isolated")
        summary = run(job.alone(), fork=fork, say=say)
    return summary


def record(job: Job, *, fork: bool, say: Callable[[str], None] = lambda line: None) -> None:
    """Run a job that only records (``run/states.py``), to its end; ``fork`` as of :func:`run`.

    Raises ``TTraceError`` when a rank failed, with the reason.
    """
    with shared.claim(job.directory) as claim:
        observed = _run_ranks(job, claim.run, fork, Progress(say))
    if set(observed.codes) != {0}:
        raise TTraceError(_why(observed, job.directory / shared.LOGS))


def configuration(job: Job, *, fork: bool, say: Callable[[str], None]) -> list[str]:
    """What flags of Megatron-LM a script's configuration stands for (``jobs/shrink/bridge.py``).

    The script runs as one rank, until it trains; ``fork`` as of :func:`run`. Raises ``TTraceError``
    when it fails, or does not train.
    """
    file = job.directory / "flags.json"
    owned.remove(file)
    settings = dataclasses.replace(job.settings, role="plan", overrides=file)
    record(dataclasses.replace(job, settings=settings, nproc=1), fork=fork, say=say)
    if not file.is_file():
        raise TTraceError(f"{job.script} ended before pretrain() or finetune() of Megatron-Bridge")
    return [str(word) for word in json.loads(file.read_text(encoding="utf-8"))]


def _run_ranks(job: Job, run_id: str, fork: bool, progress: Progress) -> ranks.Observed:
    """Run a job's ranks, once more if another process took their port."""
    logs = job.directory / shared.LOGS
    assigned = [f"{name}={value}" for name, value in job.environment.items()]
    disclosure.withhold([*assigned, "python", str(job.script), *job.arguments])
    program = (sys.executable, str(job.script)) if fork else scripts.command(job.script)
    settings = dataclasses.replace(job.settings, exit_after=True)
    command = (*program, *job.arguments, CHECK.name, *settings.words())
    environment = {
        provenance.COMMAND: provenance.command_line(),
        **job.environment,
        shared.VARIABLE: run_id,
    }
    # Without the fork server rank 0 limits the reference run, and should give up first.
    timeout = job.settings.timeout + (0.0 if fork else _MARGIN_SECONDS)
    watch = _Watch(job, ranks.log_of(logs, 0), progress, fork)
    nodes = int(job.environment.get(provenance.NODES, "1"))
    for _ in range(2):
        observed = ranks.run_ranks(
            job.nproc,
            command,
            logs,
            fork=fork,
            environment=environment,
            progress=watch,
            patience=Patience(timeout, progress.note, _logs_of_references(job)),
            # A rank's GPU is the one of its local number.
            nodes=nodes if nodes > 1 and forkserver.needs_cpu(settings.device) else 1,
        )
        watch.flush()
        if not any(port_was_taken(ranks.log_of(logs, rank)) for rank in range(job.nproc)):
            break
    return observed


def _believed(directory: Path, run_id: str, observed: ranks.Observed) -> Summary:
    """The answer of a run whose ranks ended as was observed.

    All ranks must have ended with the same code, and the summary of this very run must be intact,
    belong to the verdicts beside it, and say the same. Otherwise this raises ``TTraceError``.
    (Ranks that could not check end with 2, with a summary or without one.)
    """
    from megatron_ttrace.trace import files

    logs = directory / shared.LOGS
    answers = set(observed.codes)
    if answers == {ExitCode.COULD_NOT_CHECK}:
        with contextlib.suppress(TTraceError):
            summary = files.answer_of(directory, run_id)
            if summary.verdict is Result.COULD_NOT_CHECK:
                return summary
    is_answer = answers in ({ExitCode.EQUIVALENT}, {ExitCode.DIVERGED})
    if not (directory / files.SUMMARY).exists():
        raise TTraceError(_without_answer(observed, logs))
    if not is_answer:
        raise TTraceError(_why(observed, logs))
    summary = files.answer_of(directory, run_id)
    if {summary.verdict.exit_code} != answers:
        (code,) = answers
        raise TTraceError(
            f"the ranks ended with exit code {code}, but {directory / files.SUMMARY} says "
            f"{summary.verdict.value!r}: run the check again (logs: {logs})"
        )
    return summary


def _logs_of_references(job: Job) -> list[Path]:
    first_of_several = ranks.log_of(job.directory / shared.REFERENCE_LOGS, 0)
    return [job.directory / "reference.log", job.directory / "replay.log", first_of_several]


class _Watch:
    """Repeats our own lines of the job's logs as they appear, and enforces the time limit."""

    def __init__(self, job: Job, log: Path, progress: Progress, fork: bool) -> None:
        self._log = log
        # Without the fork server rank 0 starts the reference and repeats its lines itself.
        logs = _logs_of_references(job) if fork else []
        self._echoes = [
            Echo(self._log, progress.heard),
            *(Echo(log, progress.heard, OF_REFERENCE) for log in logs),
        ]
        self._progress = progress
        self._limit = job.limit
        self._deadline = None if job.limit is None else time.monotonic() + job.limit
        self._next = 0.0

    def __call__(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise OutOfTimeError(f"still running after {self._limit:.0f} s (log: {self._log})")
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 0.2
        self.flush()
        self._progress.tick()

    def flush(self) -> None:
        for echo in self._echoes:
            echo.flush()


def _why(observed: ranks.Observed, logs: Path) -> str:
    """One reason out of many logs and exit codes.

    In this order: processes that are stopped; ranks that were killed from outside, or crashed
    before any other rank gave up; the rank that failed first, and not because of another. Ranks
    that we ended are never the reason.
    """
    if observed.stopped:
        are = "is" if len(observed.stopped) == 1 else "are"
        names = ", ".join(map(str, observed.stopped[:4]))
        return f"{names} {are} stopped; the others gave up (log: {observed.stopped[0].log})"
    gave_up = False
    for end in observed.ends:
        gave_up |= end.code > 0
        if -end.code in _UNBIDDEN or (end.code < 0 and not gave_up and not _aborted(end)):
            return f"rank {end.rank} {how_it_ended(end.code)}; {last_lines(end.log)}"
    failed = sorted((end for end in observed.ends if end.code), key=lambda end: end.rank)
    if failed:
        kind = _kind(min(failed, key=_order))
        # Where all ranks fail alike, the lowest number says so best.
        return _failure(next(end for end in failed if _kind(end) == kind))
    return (
        "the job ended without a result: no training step was checked (a loop of your own hands "
        f"its step to the check: docs/trainers.md); {last_lines(ranks.log_of(logs, 0))}"
    )


def _without_answer(observed: ranks.Observed, logs: Path) -> str:
    """:func:`_why`, where no rank had an answer, and which one left first as if it had."""
    end = next(iter(observed.ends), None)
    if end is None or end.code or set(observed.codes) == {0}:
        return _why(observed, logs)
    left = f"rank {end.rank} ended with exit code 0 before the check was over"
    if any(other.code for other in observed.ends):
        return f"{left} (log: {end.log}); {_why(observed, logs)}"
    return f"{left}; {last_lines(end.log)}"


def _kind(end: ranks.End) -> object:
    record = record_of(end.log)
    return end.code, dataclasses.replace(record, at=0) if record else end.rank


def _order(end: ranks.End) -> tuple[bool, int]:
    """Sorts the rank that failed by itself, and first, before those that failed because of it."""
    if record := record_of(end.log):
        return record.follows, record.at
    # Without a record, exit code 1 is that of a rank whose check diverged, or of os._exit.
    return end.code == ExitCode.DIVERGED, _fell_silent(end)


def _failure(end: ranks.End) -> str:
    how, log = how_it_ended(end.code), end.log
    record = record_of(log)
    if record is not None and record.reason:
        if not record.error:
            return record.reason
        return f"rank {end.rank} failed: {record.reason} (log: {log})"
    if died := died_of(log):
        return f"rank {end.rank} {how if end.code < 0 else 'failed'}: {died} (log: {log})"
    if full := unwritable(log):
        return f"rank {end.rank} {how}: {log} cannot be written ({full})"
    return f"rank {end.rank} {how}; {last_lines(log)}"


def _fell_silent(end: ranks.End) -> int:
    """When a rank last wrote to its log; for a crash, which writes nothing, when it ended."""
    if end.code < 0 and -end.code != signal.SIGABRT:
        return end.seen
    return end.log.stat().st_mtime_ns if end.log.is_file() else 0


def _aborted(end: ranks.End) -> bool:
    """Whether an exception ended this rank: perhaps a lost connection to another rank."""
    has_raised = -end.code == signal.SIGABRT and bool(died_of(end.log))
    return has_raised or record_of(end.log) is not None
