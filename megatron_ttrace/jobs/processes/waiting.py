# SPDX-License-Identifier: Apache-2.0
"""How long a job's processes are waited for, and the messages meanwhile."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.sanitise import some_of

_LOOK_SECONDS = 0.25
_LONGEST_LOOK_SECONDS = 1.0
_FIRST_WORD_SECONDS = 30.0


class OutOfTimeError(TTraceError):
    """The job was still running at its limit, or did nothing for too long."""


@dataclasses.dataclass(frozen=True, slots=True)
class Waited:
    """A rank of a job, or of its reference: while that is made, the job's ranks are silent."""

    rank: int
    pid: int
    log: Path
    is_reference: bool = False

    def __str__(self) -> str:
        name = "the reference run" if self.is_reference else f"rank {self.rank}"
        return f"{name} (pid {self.pid})"

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP, Ctrl-Z), from Linux's ``/proc``."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return text.rpartition(")")[2].split()[:1] == ["T"]


class Patience:
    """Limits the waiting.

    A reference run may take ``timeout`` seconds. While none runs, ranks may be silent for as long:
    no log grows, and no process starts or ends. Time counts only while this process runs, so that a
    machine that was suspended causes no time-out.
    """

    def __init__(
        self,
        timeout: float | None,
        say: Callable[[str], None] = lambda line: None,
        logs: Sequence[Path] = (),
    ) -> None:
        """``logs`` are those of other processes, whose growth counts too."""
        self._timeout = timeout
        self._say = say
        self._logs = logs
        self._seen: object = None
        self._idle = 0.0
        self._word = _FIRST_WORD_SECONDS
        self._last = time.monotonic()
        self._stopped: frozenset[int] = frozenset()
        self._reported: set[int] = set()

    def look(self, waited: Sequence[Waited]) -> None:
        """To be called repeatedly with the processes that are waited for now.

        Raises ``OutOfTimeError`` when it took too long.
        """
        now = time.monotonic()
        if now - self._last < _LOOK_SECONDS or not waited:
            return
        self._idle += min(now - self._last, _LONGEST_LOOK_SECONDS)
        self._last = now
        references = [process for process in waited if process.is_reference]
        self._report_stopped(waited)
        seen = self._signs(waited, bool(references))
        if seen != self._seen:
            self._seen, self._idle, self._word = seen, 0.0, _FIRST_WORD_SECONDS
            return
        named = references or list(waited)
        if self._timeout is not None and self._idle >= self._timeout:
            raise OutOfTimeError(self._too_long(named, waited))
        if self._idle >= self._word:
            self._word *= 2
            limit = "" if self._timeout is None else f" of at most {self._timeout:.0f}"
            self._say(
                f"waiting for {_names(named)}: {self._idle:.0f} s{limit} (log: {named[0].log})"
            )

    def _signs(self, waited: Sequence[Waited], reference: bool) -> object:
        """A value that changes when something happens."""
        pids = tuple(process.pid for process in waited)
        if reference:
            return pids
        return pids, [_size(log) for log in (*(process.log for process in waited), *self._logs)]

    def _report_stopped(self, waited: Sequence[Waited]) -> None:
        """Report a process that two looks in a row found stopped."""
        stopped = {process.pid: process for process in waited if process.is_stopped}
        for pid, process in stopped.items():
            if pid in self._stopped and pid not in self._reported:
                self._reported.add(pid)
                self._say(f"{process} is stopped; 'kill -CONT {pid}' continues it")
        self._stopped = frozenset(stopped)
        self._reported &= stopped.keys()

    def _too_long(self, named: Sequence[Waited], waited: Sequence[Waited]) -> str:
        stopped = [process for process in waited if process.is_stopped]
        if stopped:
            are = "is" if len(stopped) == 1 else "are"
            reason = f"{_names(stopped)} {are} stopped, and nothing happened for"
        elif named[0].is_reference:
            reason = f"{_names(named)} did not end within"
        else:
            reason = f"{_names(named)} produced no output for"
        log = (stopped or named)[0].log
        return f"{reason} {self._idle:.0f} s; --timeout SECONDS waits longer (log: {log})"


def _names(processes: Sequence[Waited]) -> str:
    return some_of([*map(str, processes)], 4)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return -1
