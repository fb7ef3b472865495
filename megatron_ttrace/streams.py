# SPDX-License-Identifier: Apache-2.0
"""Standard streams that never change the exit code of a command.

``ttrace check ... | head -1`` closes its standard output early, ``>&-`` before the start, and a
full disk refuses it. None of that is an answer about the job. This is imported first, so it uses
only the standard library.
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
"""There is no reader: a closed pipe, a terminal that is gone."""


def steady() -> None:
    """Let this process's standard streams survive whatever happens to the files behind them.

    A stream that was closed before the start is opened to ``/dev/null``. Otherwise the next file
    that is opened gets its number, and "standard output" is written into that file.
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
    """A file that accepts everything: what cannot be written is lost, with one warning."""

    _lost = False

    def write(self, data: Buffer, /) -> int:
        """Write; never raises ``OSError``."""
        size = memoryview(data).nbytes
        if self._lost:
            return size
        try:
            while (written := super().write(data)) is None:
                # The file is non-blocking: wait.
                select.select([], [self.fileno()], [])
        except OSError as error:
            self._lost = True
            if error.errno not in _QUIET and self.fileno() != 2:
                tell(f"ttrace: WARNING: standard output is lost: {error.strerror}")
            return size
        return written


def _text(number: int, old: TextIO | None, errors: str) -> TextIO:
    """A text stream over a steady file, with the interpreter's settings."""
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
