# SPDX-License-Identifier: Apache-2.0
"""Start commands as forks of a process that has Megatron imported, and see what they leave behind.

A command that is started so behaves as one that a shell started (session, streams, signals, exit
code), except that its imports are free.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

import psutil

from megatron_ttrace.jobs.processes import forkserver
from tests.warm import execute

ROOT = Path(__file__).resolve().parents[3]
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.02


class Target(StrEnum):
    """Whom a signal is sent to."""

    LAUNCHER = "launcher"
    GROUP = "launcher's process group"
    RANK0 = "rank 0"
    RANK1 = "rank 1"
    REFERENCE = "reference run"
    HELPER = "another process of the job"


class Stream(StrEnum):
    """What a standard stream is connected to."""

    FILE = "a file"
    CLOSED = "closed"
    FULL = "/dev/full"
    BROKEN = "a pipe that nobody reads"


_LOGS = {
    Target.RANK0: "rank-00000.log",
    Target.RANK1: "rank-00001.log",
    Target.REFERENCE: "reference.log",
    Target.HELPER: "helper",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What to start: the ``ttrace`` command with these words, or a training script.

    Attributes:
        words: arguments, without the program.
        home: working directory, where ``stdout.txt`` and ``stderr.txt`` are written as ``name``.
        script: train with this script instead of running ``ttrace``.
        variables: changes to the environment; ``None`` removes a variable.
        limit: most bytes a file may grow to, or ``None``.
        stdin, stdout, stderr: what is unusual needs a fresh interpreter.
        cold: a fresh interpreter instead of a fork.
    """

    words: tuple[str, ...]
    home: Path
    name: str = "run"
    script: Path | None = None
    variables: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    stdin: Stream = Stream.FILE
    stdout: Stream = Stream.FILE
    stderr: Stream = Stream.FILE
    limit: int | None = None
    cold: bool = False

    def output(self, stream: str) -> Path:
        """The file that a stream is written to."""
        return self.home / f"{self.name}.{stream}.txt"


class Started:
    """A running command, the first process of a session of its own."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.began = time.monotonic()
        self.ended: float | None = None
        self.code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _become(command)

    def poll(self) -> int | None:
        """The exit code, once there is one; negative for a signal."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.ended = time.monotonic()
        return self.code

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the end or a condition; returns whether it ended."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline and not until():
            time.sleep(_POLL_SECONDS)
        return self.code is not None

    def find(self, target: Target) -> int | None:
        """The process id of a part of this command's job."""
        if target in (Target.LAUNCHER, Target.GROUP):
            return self.pid
        logs: dict[str, int] = {}
        for pid in descendants(self.pid):
            with contextlib.suppress(OSError):
                log = Path(os.readlink(f"/proc/{pid}/fd/1")).name
                # The first process with a log is the rank; what it forks has the same one.
                logs[log if log not in logs else "helper"] = pid
        return logs.get(_LOGS[target])


def warm() -> None:
    """Import in this process what the commands need."""
    forkserver.preload(ROOT / "launch" / "pretrain_gpt.py")
    gc.collect()
    gc.freeze()


def adopt_orphans() -> None:
    """Become the parent of processes whose parent dies, so that they are seen."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Leave nothing behind when the campaign itself is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Living processes below one; zombies do not count."""
    living: list[int] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(root).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    living.append(process.pid)
    return living


def bury(seconds: float) -> list[str]:
    """Give all processes below this one time to end; kill the others and say what they were."""
    deadline = time.monotonic() + seconds
    while True:
        _reap()
        left = descendants(os.getpid())
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    descriptions = [_describe(pid) for pid in left]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while left and any(pid in left for pid in descendants(os.getpid())):
        _reap()
        time.sleep(0.01)
    _reap()
    return descriptions


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/1")
    return f"process {pid}"


def _become(command: Command) -> None:
    """Turn this fork into the command. Never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        os.chdir(command.home)
        if command.limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (command.limit, command.limit))
        for name, value in command.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _connect(command)
        program = ["-m", "megatron_ttrace"] if command.script is None else [str(command.script)]
        words = [*program, *command.words]
        if command.cold:
            os.execv(sys.executable, [sys.executable, *words])
        # Python's objects for the three.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        # As an interpreter does: a script's folder, or the working directory.
        sys.path.insert(0, str(Path(program[-1]).resolve().parent))
        code = execute(words)
        atexit._run_exitfuncs()
    finally:
        os._exit(code)


def _connect(command: Command) -> None:
    """The three standard streams."""
    streams = (command.stdin, command.stdout, command.stderr)
    # Opened first, so that no file takes the number of a closed stream.
    sources = [_open(command, number, stream) for number, stream in enumerate(streams)]
    for number, source in enumerate(sources):
        if source is None:
            with contextlib.suppress(OSError):
                os.close(number)
        else:
            os.dup2(source, number)
            os.set_inheritable(number, True)
    for source in sources:
        if source is not None and source > 2:
            os.close(source)


def _open(command: Command, number: int, stream: Stream) -> int | None:
    if stream is Stream.CLOSED:
        return None
    if stream is Stream.FULL:
        return os.open("/dev/full", os.O_RDWR)
    if stream is Stream.BROKEN:
        reading, writing = os.pipe()
        os.close(reading)
        return writing
    if number == 0:
        return os.open("/dev/null", os.O_RDONLY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    return os.open(command.output(("", "stdout", "stderr")[number]), flags, 0o644)
