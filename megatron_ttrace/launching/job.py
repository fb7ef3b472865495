# SPDX-License-Identifier: Apache-2.0
"""One check on this machine, from a command line to an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ttrace.errors import ExitCode, TTraceError
from megatron_ttrace.integration import provenance
from megatron_ttrace.launching import forkserver, ranks
from megatron_ttrace.launching import script as scripts
from megatron_ttrace.launching.logs import died_of
from megatron_ttrace.records import Summary
from megatron_ttrace.reference.launch import port_was_taken, tail
from megatron_ttrace.resources import launch_dir

_OURS = re.compile(r"^ttrace: (.*)$")


@dataclasses.dataclass(frozen=True)
class Job:
    """What to check.

    Attributes:
        script: a Megatron training script.
        arguments: its arguments, without ours.
        nproc: number of ranks.
        directory: the ``--ttrace-dir``.
        flags: further ``--ttrace-*`` flags.
        environment: added to each rank's environment.
        limit: seconds after which the job is ended, or ``None``.
    """

    script: Path
    arguments: tuple[str, ...]
    nproc: int
    directory: Path
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    limit: float | None = None

    def isolating(self) -> list[str]:
        """The command that checks this job with modules isolated, in a directory of its own."""
        words = ["ttrace", "check", "--nproc-per-node", str(self.nproc)]
        words += ["--ttrace-dir", f"{self.directory}-isolated", "--ttrace-isolate", *self.flags]
        return [*words, "--", str(self.script), *self.arguments]


class OutOfTimeError(TTraceError):
    """The job was still running at its limit."""


def prepare(device: str = "auto", script: Path | None = None) -> bool:
    """Import Megatron here when ranks can be forked; returns whether they can.

    Args:
        device: of the job.
        script: whose Megatron it is; by default that of our own ``pretrain_gpt.py``.
    """
    from megatron_ttrace import cpu

    if not cpu.needed(device):
        return False
    forkserver.preload(script or launch_dir() / "pretrain_gpt.py")
    return True


def run(job: Job, *, fork: bool, say: Callable[[str], None] = lambda line: None) -> Summary:
    """Run a check to its end.

    Args:
        job: what to check.
        fork: what :func:`prepare` returned.
        say: told what happens, line by line.

    Raises:
        OutOfTimeError: when it took longer than its limit; its ranks are ended.
        TTraceError: when there is no answer, with the reason.
    """
    from megatron_ttrace.report import files

    if not job.script.is_file():
        raise TTraceError(f"{job.script}: no such script")
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        for stale in (files.SUMMARY, files.VERDICTS):
            with contextlib.suppress(FileNotFoundError):
                (job.directory / stale).unlink()
        shutil.rmtree(job.directory / "candidate", ignore_errors=True)
    except OSError as error:
        raise TTraceError(
            f"--ttrace-dir {job.directory} is not writable ({error.strerror}): choose another"
        ) from error
    logs = job.directory / "logs"
    if fork and (why := forkserver.refuses(job.script)):
        say(f"{job.script} runs in fresh processes: {why}")
        fork = False
    program = (ranks.python(), str(job.script)) if fork else scripts.command(job.script)
    command = (
        *(*program, *job.arguments),
        *("--ttrace", "--ttrace-exit", "--ttrace-dir", str(job.directory), *job.flags),
    )
    echo = _Echo(ranks.log_of(logs, 0), say, job.limit)
    environment = {provenance.COMMAND: provenance.command_line(), **job.environment}
    began = time.monotonic()
    for _ in range(2):
        codes = ranks.run_ranks(
            job.nproc, command, logs, fork=fork, environment=environment, progress=echo
        )
        echo.flush()
        if not any(port_was_taken(ranks.log_of(logs, rank)) for rank in range(job.nproc)):
            break
    if set(codes) <= {0, 1} and len(set(codes)) == 1:
        with contextlib.suppress(TTraceError):
            summary = files.read_summary(job.directory / files.SUMMARY)
            return dataclasses.replace(
                summary, timings={**summary.timings, "wall": time.monotonic() - began}
            )
    raise TTraceError(_why(codes, logs))


class _Echo:
    """Repeats our own lines of a growing log as they appear, and looks at the clock."""

    def __init__(self, log: Path, say: Callable[[str], None], limit: float | None) -> None:
        self._log = log
        self._say = say
        self._limit = limit
        self._deadline = None if limit is None else time.monotonic() + limit
        self._offset = 0
        self._next = 0.0

    def __call__(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise OutOfTimeError(f"still running after {self._limit:.0f} s (log: {self._log})")
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 0.2
        self.flush()

    def flush(self) -> None:
        """Repeat what there is by now."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self._offset)
            while line := log.readline():
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                match = _OURS.match(line.decode(errors="replace").rstrip())
                if match:
                    self._say(match[1])


def _why(codes: Sequence[int | None], logs: Path) -> str:
    """One reason out of many logs: our own words first, else what a rank died of."""
    told = [_told(ranks.log_of(logs, rank)) for rank in range(len(codes))]
    for rank, reason in enumerate(told):
        if codes[rank] == ExitCode.COULD_NOT_CHECK and reason:
            return reason
    failed = [(rank, code) for rank, code in enumerate(codes) if code not in (0, None)]
    if failed:
        # The others die of a lost connection to it: whoever wrote last words first is the cause.
        rank, code = min(failed, key=lambda one: _last_written(ranks.log_of(logs, one[0])))
        log = ranks.log_of(logs, rank)
        how = f"was killed by signal {-code}" if code is not None and code < 0 else "failed"
        died = died_of(log)
        if died:
            return f"rank {rank} {how}: {died} (log: {log})"
        last = f"its last lines, from {log}:\n{tail(log)}"
        return f"rank {rank} {how} with exit code {code}; {last}"
    return f"the job ended without an answer; its last lines:\n{tail(ranks.log_of(logs, 0))}"


def _last_written(log: Path) -> int:
    return log.stat().st_mtime_ns if log.is_file() else 0


def _told(log: Path) -> str:
    """What we said last on a rank, with the lines that belong to it."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _OURS.match(line)]
    if not starts:
        return ""
    block = [lines[starts[-1]].removeprefix("ttrace: ")]
    for line in lines[starts[-1] + 1 :]:
        if not line.startswith("  "):
            break
        block.append(line)
    return "\n".join(block)
