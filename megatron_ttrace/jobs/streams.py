# SPDX-License-Identifier: Apache-2.0
"""Standard streams that never change the exit code of a command.

``ttrace check ... | head -1`` closes its standard output early, ``>&-`` before the start, and a
full disk refuses it. None of that is an answer about the job. What is printed may quote a model,
log or file of a stranger's: nothing that passes these streams controls the terminal. This is
imported first, so it uses only the standard library.
"""

import contextlib
import errno
import io
import os
import re
import select
import sys
from collections.abc import Buffer
from typing import TextIO

_QUIET = frozenset({errno.EPIPE, errno.EIO, errno.EBADF})
"""There is no reader: a closed pipe, a terminal that is gone."""

_CONTROL = re.compile(
    r"(?P<colour>\x1b\[(?!8m)[0-9;]*m)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)
"""Everything that is not shown, apart from tabs and line ends; colours are ours (Rich's)."""


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


def harmless(text: str) -> str:
    """A text with its control characters as escapes, but for line ends, tabs and colours."""
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda match: match["colour"] or ascii(match[0])[1:-1], text)


class _Harmless(io.TextIOWrapper):
    """A text stream that controls no terminal."""

    def write(self, text: str, /) -> int:
        """Write it as :func:`harmless`; returns the length of what was given."""
        super().write(harmless(text))
        return len(text)


def _text(number: int, old: TextIO | None, errors: str) -> TextIO:
    """A text stream over a steady file, with the interpreter's settings."""
    if old is not None and errors == "strict":
        # A log in ASCII must not raise either.
        errors = "backslashreplace" if old.errors == "strict" else old.errors or errors
    raw = SteadyFile(number, "w", closefd=False)
    return _Harmless(
        io.BufferedWriter(raw),
        encoding=getattr(old, "encoding", None) or "utf-8",
        errors=errors,
        line_buffering=number == 2 or raw.isatty(),
    )
