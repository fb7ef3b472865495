# SPDX-License-Identifier: Apache-2.0
"""Run all ranks of a job on this machine and watch over them."""

import contextlib
import dataclasses
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_ttrace.jobs.processes import child, forkserver, signals
from megatron_ttrace.jobs.processes.waiting import Patience, Waited
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import reported

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0
_LEAVING_SECONDS = 2.0
_REAPING_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """How a rank ended: its exit code (negative: a signal), and when, in ns since the epoch.

    ``log`` has its output.
    """

    rank: int
    code: int
    seen: int
    log: Path


@dataclasses.dataclass(slots=True)
class Observed:
    """What was observed of a job's processes.

    ``ends`` are of its ``nproc`` ranks, in the order in which they ended, without those that we
    ended; ``stopped`` are processes that were stopped (SIGSTOP) when the job ended.
    """

    nproc: int
    ends: list[End] = dataclasses.field(default_factory=list)
    stopped: list[Waited] = dataclasses.field(default_factory=list)

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of the ranks; ``None`` for those that we ended."""
        by_rank = {end.rank: end.code for end in self.ends}
        return [by_rank.get(rank) for rank in range(self.nproc)]


def log_of(logs: Path, rank: int) -> Path:
    """The file with the output of a rank."""
    return logs / f"rank-{rank:05d}.log"


def run_ranks(
    nproc: int,
    command: Sequence[str],
    logs: Path,
    *,
    fork: bool,
    environment: dict[str, str] | None = None,
    progress: Callable[[], None] = lambda: None,
    patience: Patience | None = None,
    world: int | None = None,
    nodes: int = 1,
) -> Observed:
    """Run ``[python, script, *args]`` as ``nproc`` ranks to their end.

    When a rank dies, the others have some seconds to end by themselves; then they are killed. No
    process of the job is left when this returns or raises, nor when this process is killed.

    With ``fork`` the ranks are forks of this process (``forkserver.preload`` first).
    ``environment`` is added to each rank's, and ``progress`` is called several times per second.
    ``world``: ranks of the job, where only the first ``nproc`` of them are started; ``nodes``: the
    machines on which they seem to be.

    Raises:
        OutOfTimeError: when ``patience`` has run out.
        TTraceError: when a rank cannot be started.
    """
    owned.make(logs, owned.PRIVATE_FOLDER)
    job = _Job(fork, nproc)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    base = child.environment_of(
        world or nproc, {**threads, **(environment or {}), **job.environment}
    )
    local = int(base["WORLD_SIZE"]) // nodes
    base["LOCAL_WORLD_SIZE"] = str(local)
    with signals.orderly(), reported("a rank cannot be started", OSError):
        try:
            for rank in range(nproc):
                variables = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank % local)}
                job.start(rank, command, variables, log_of(logs, rank))
            return job.watch(progress, patience or Patience(None))
        finally:
            with signals.deferred():
                job.end()


class _Job:
    """The processes of one job, forks or subprocesses, by process id."""

    def __init__(self, fork: bool, nproc: int) -> None:
        self._requests = forkserver.Requests() if fork else None
        self._observed = Observed(nproc)
        self._failed: tuple[int, int] | None = None  # the first code that is not 0, and whose
        self._ending = math.inf  # when the other ranks of a failed reference are ended
        self._groups: list[int] = []
        self._waited: dict[int, Waited] = {}
        self._watched: dict[int, int] = {}
        # Without this reference the next Popen would reap a process and lose its exit code.
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return self._requests.environment if self._requests else {}

    def start(
        self, rank: int, command: Sequence[str], environment: dict[str, str], log: Path
    ) -> None:
        # A signal must not arrive between the start of a process and its registration.
        with signals.deferred():
            if self._requests:
                pid = forkserver.fork(command, environment, log)
            else:
                process = child.start(command, environment, log, group=0)
                self._processes[pid := process.pid] = process
            self._watch_over(Waited(rank, pid, log))

    def _watch_over(self, process: Waited) -> None:
        self._waited[process.pid] = process
        self._groups.append(process.pid)
        # An old kernel has no pidfd: processes are then only polled.
        with contextlib.suppress(OSError, AttributeError):
            self._watched[process.pid] = os.pidfd_open(process.pid)

    @property
    def _references(self) -> list[Waited]:
        """The ranks of a reference run that have not ended."""
        return [process for process in self._waited.values() if process.is_reference]

    def watch(self, progress: Callable[[], None], patience: Patience) -> Observed:
        ends = self._observed.ends
        deadline: float | None = None
        while True:
            self._reap()
            if len(self._waited) == len(self._references):
                break
            self._serve()
            if time.monotonic() > self._ending:
                for reference in self._references:
                    _kill(reference.pid)
            if deadline is None and any(end.code not in (0, 1) for end in ends):
                deadline = time.monotonic() + _GRACE_SECONDS
            if deadline is None and ends:
                # One rank ended early: in an orderly end all end together.
                deadline = time.monotonic() + 6 * _GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                break
            signals.check()
            patience.look(list(self._waited.values()))
            progress()
            self._pause()
        waited = self._waited.values()
        self._observed.stopped += [process for process in waited if process.is_stopped]
        return self._observed

    def _pause(self) -> None:
        """Wait until a process ends or asks, but not long: the first to die is the cause."""
        waiter = select.poll()
        for descriptor in self._watched.values():
            waiter.register(descriptor, select.POLLIN)
        if self._requests is not None and not self._references:
            waiter.register(self._requests.fileno(), select.POLLIN)
        waiter.poll(_POLL_SECONDS * 1000)

    def _reap(self) -> None:
        for process, code in self._ended():
            if process.is_reference:
                if code and self._failed is None:
                    self._failed = code, process.rank
                    self._ending = time.monotonic() + _GRACE_SECONDS
                if self._requests and not self._references:
                    self._requests.answer(*(self._failed or (0, 0)))
                    self._failed, self._ending = None, math.inf
            else:
                self._observed.ends.append(End(process.rank, code, time.time_ns(), process.log))

    def _ended(self) -> Iterator[tuple[Waited, int]]:
        """Processes that have ended since the last call, and their exit codes."""
        for pid in list(self._waited):
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                ended, status = pid, 1 << 8
            if not ended:
                continue
            code = os.waitstatus_to_exitcode(status)
            descriptor = self._watched.pop(pid, None)
            if descriptor is not None:
                os.close(descriptor)
            if pid in self._processes:
                self._processes[pid].returncode = code
            yield self._waited.pop(pid), code

    def _serve(self) -> None:
        if self._requests is None or self._references:
            return
        request = self._requests.poll()
        if request is None:
            return
        command, ranks = request
        for rank, (environment, log) in enumerate(ranks):
            with signals.deferred():
                pid = forkserver.fork(command, environment, log)
                self._watch_over(Waited(rank, pid, log, is_reference=True))

    def end(self) -> None:
        """Kill what is left: the processes that we started, then those that they started."""
        for pid in self._waited:
            _kill(pid)
        deadline = time.monotonic() + _REAPING_SECONDS
        while self._waited and time.monotonic() < deadline:
            if not list(self._ended()):
                time.sleep(0.005)
        # Workers of a data loader end by themselves when their rank is gone.
        deadline = time.monotonic() + _LEAVING_SECONDS
        while (groups := [*filter(_has_members, self._groups)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        for group in groups:
            # Not the leader: it is gone, and its process id may be reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for descriptor in self._watched.values():
            os.close(descriptor)
        if self._requests:
            self._requests.close()


def _kill(group: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(group, signal.SIGKILL)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True
