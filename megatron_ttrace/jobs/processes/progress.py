# SPDX-License-Identifier: Apache-2.0
"""Lines about long work: at least one every few seconds, each saying what is being done."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

EVERY_SECONDS = 4.5
"""The longest silence: with the time between two ticks, less than 5 s."""
_TICK_SECONDS = 0.25
_LINE_BYTES = 1 << 16
_OURS = "ttrace: "
NOTICE = "notice: "
"""What a line starts with, after our name, that is true from now on, and nothing that begins."""
OF_REFERENCE = "reference: "
"""What lines of a reference run about its progress start with, after our name."""


_log: ContextVar[TextIO | None] = ContextVar("log", default=None)


def say(line: str) -> None:
    """Print one of our lines to a rank's log, from which :class:`Echo` repeats it."""
    if (log := _log.get()) is None:
        print(f"{_OURS}{line}", flush=True)
        return
    # The script may be in the middle of a line.
    log.write(f"\n{_OURS}{line}\n")
    log.flush()


def print_to(log: TextIO) -> None:
    """Let :func:`say` print to a log, in a thread beside the script, which may redirect output."""
    _log.set(log)


class Progress:
    """Reports what is being done; after a silence :meth:`tick` repeats it with its duration."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._doing = ""
        self._began = self._last = time.monotonic()

    def __call__(self, line: str) -> None:
        """Report what begins now."""
        self._doing = line
        self._began = time.monotonic()
        self.note(line)

    def note(self, line: str) -> None:
        """Report something in between."""
        self._last = time.monotonic()
        self._say(line)

    def heard(self, line: str) -> None:
        """Repeat a line of another process of the job."""
        (self.note if line.startswith(NOTICE) else self)(line)

    def tick(self) -> None:
        """To be called several times per second."""
        now = time.monotonic()
        if self._doing and now - self._last >= EVERY_SECONDS:
            self.note(f"{self._doing} ({now - self._began:.0f} s so far)")

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Tick from a thread, for work that does not return in between; afterwards it has ended."""
        done = threading.Event()

        def ticks() -> None:
            while not done.wait(_TICK_SECONDS):
                self.tick()

        thread = threading.Thread(target=ticks, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class Echo:
    """Repeats our own lines of a log that another process writes."""

    def __init__(self, log: Path, say: Callable[[str], None], start: str = "") -> None:
        """``start``: only lines that start with this, after our name."""
        self._log = log
        self._say = say
        self._start = _OURS + start
        self._offset = 0
        self._skips = False  # inside of a line that is too long to be ours

    def flush(self) -> None:
        """Repeat the lines that were completed since the last call."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            if os.fstat(log.fileno()).st_size < self._offset:
                self._offset = 0  # another process has begun the log again
            log.seek(self._offset)
            while (line := log.readline(_LINE_BYTES)).endswith(b"\n") or len(line) == _LINE_BYTES:
                self._offset += len(line)
                skips, self._skips = self._skips, not line.endswith(b"\n")
                if skips or self._skips:
                    continue
                text = line.decode(errors="replace").rstrip()
                if text.startswith(self._start):
                    self._say(clean(text.removeprefix(_OURS), NOTE_LIMIT))
