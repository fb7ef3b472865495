# SPDX-License-Identifier: Apache-2.0
"""Standard streams of a command that never decide its exit code.

``ttrace check ... | head -1`` closes its standard output early, ``>&-`` before the start, and a
full disk refuses it. None of that is an answer about the job. Imported before anything else: only
the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Buffer
from typing import TextIO

_QUIET = frozenset({errno.EPIPE, errno.EIO, errno.EBADF})
"""Nobody reads any more: a closed pipe, a terminal that is gone."""


def steady() -> None:
    """Let this process's standard streams survive whatever happens to the files behind them.

    A stream that was closed before the start is opened to ``/dev/null``: else the next file that is
    opened gets its number, and everything that writes to "standard output" writes into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            os.set_inheritable(number, True)
    sys.stdout = _text(1, sys.stdout, "strict")
    sys.stderr = _text(2, sys.stderr, "backslashreplace")


def tell(line: str) -> None:
    """Write a line to standard error, past all buffers; never raises."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


class SteadyFile(io.FileIO):
    """A file that takes everything: what cannot be written is lost, the first time with a word."""

    _lost = False

    def write(self, data: Buffer, /) -> int:
        """Write, or pretend to."""
        size = memoryview(data).nbytes
        if self._lost:
            return size
        try:
            while (written := super().write(data)) is None:
                # The other end does not block; we do.
                select.select([], [self.fileno()], [])
        except OSError as error:
            self._lost = True
            if error.errno not in _QUIET and self.fileno() != 2:
                tell(f"ttrace: WARNING: standard output is lost: {error.strerror}")
            return size
        return written


def _text(number: int, old: TextIO | None, errors: str) -> TextIO:
    """A text stream as the interpreter makes it, over a steady file."""
    if old is not None and errors == "strict":
        # A log in ASCII must not raise either.
        errors = "backslashreplace" if old.errors == "strict" else old.errors or errors
    raw = SteadyFile(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(old, "encoding", None) or "utf-8",
        errors=errors,
        line_buffering=number == 2 or raw.isatty(),
    )
