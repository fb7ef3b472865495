# SPDX-License-Identifier: Apache-2.0
"""Run all ranks of a job on this machine and watch over them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ttrace.launching import forkserver
from megatron_ttrace.reference.launch import free_port

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0


def log_of(logs: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return logs / f"rank-{rank:05d}.log"


def run_ranks(
    nproc: int,
    command: Sequence[str],
    logs: Path,
    *,
    fork: bool,
    environment: dict[str, str] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[int | None]:
    """Run ``[python, script, *args]`` as ``nproc`` ranks; returns their exit codes.

    When a rank dies the others are ended too (after a grace time in which they may end by
    themselves); those that had to be killed have the code ``None``.

    Args:
        nproc: number of ranks.
        command: of every rank.
        logs: directory for one log per rank.
        fork: fork this process (``forkserver.preload`` first) instead of starting new ones.
        environment: added to each rank's environment.
        progress: called now and then.
    """
    logs.mkdir(parents=True, exist_ok=True)
    job = _Job(fork)
    base = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **(environment or {}),
        **job.environment,
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    try:
        for rank in range(nproc):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            job.start(rank, command, {**base, **own}, log_of(logs, rank))
        return job.watch(progress)
    finally:
        job.end()


class _Job:
    """The processes of one job. Either forks (process ids) or subprocesses, by process id too."""

    def __init__(self, fork: bool) -> None:
        self._requests = forkserver.Requests() if fork else None
        self._ranks: dict[int, int] = {}
        self._reference: int | None = None
        self._codes: dict[int, int | None] = {}
        # One that is forgotten is reaped by the next that is started, and its exit code lost.
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return self._requests.environment if self._requests else {}

    def start(
        self, rank: int, command: Sequence[str], environment: dict[str, str], log: Path
    ) -> None:
        if self._requests:
            self._ranks[forkserver.fork(command, environment, log)] = rank
            return
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._processes[process.pid] = process
        self._ranks[process.pid] = rank

    def watch(self, progress: Callable[[], None]) -> list[int | None]:
        count = len(self._ranks)
        deadline: float | None = None
        while len(self._codes) < count:
            self._reap()
            self._serve()
            if deadline is None and any(code not in (0, 1) for code in self._codes.values()):
                deadline = time.monotonic() + _GRACE_SECONDS
            if deadline is None and 0 < len(self._codes) < count:
                # Somebody left early: with an orderly end all leave together.
                deadline = time.monotonic() + 6 * _GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                for rank in range(count):
                    self._codes.setdefault(rank, None)
            progress()
            time.sleep(_POLL_SECONDS)
        return [self._codes[rank] for rank in range(count)]

    def _reap(self) -> None:
        for pid in [*self._ranks, *([self._reference] if self._reference else [])]:
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                found, status = pid, 1
            if not found:
                continue
            code = os.waitstatus_to_exitcode(status)
            if pid in self._processes:
                self._processes[pid].returncode = code
            if pid == self._reference:
                self._reference = None
                if self._requests:
                    self._requests.answer(code)
            else:
                self._codes[self._ranks.pop(pid)] = code

    def _serve(self) -> None:
        if self._requests is None or self._reference is not None:
            return
        order = self._requests.poll()
        if order is not None:
            self._reference = forkserver.fork(*order)

    def end(self) -> None:
        left = [*self._ranks, *([self._reference] if self._reference else [])]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            if pid in self._processes:
                self._processes[pid].returncode = -signal.SIGKILL
        if self._requests:
            self._requests.close()


def python() -> str:
    """The interpreter ranks run with: this one."""
    return sys.executable
