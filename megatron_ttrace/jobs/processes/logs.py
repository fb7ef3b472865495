# SPDX-License-Identifier: Apache-2.0
"""Why a process failed: its own record, else the end of its log, and its exit code.

Only a process that left no record (``trace/ends.py``) is judged by its log: it was killed, aborted
in C++, called ``os._exit``, or argparse refused its arguments.
"""

import contextlib
import errno
import os
import re
import signal
from pathlib import Path

from megatron_ttrace.trace import ends, owned
from megatron_ttrace.trace.ends import EndRecord
from megatron_ttrace.trace.errors import TTraceError, without_secrets

_TAIL_LINES = 12
_ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exception|Exit): ?(.*)$")
_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ?")
_USAGE = re.compile(r"^[^\s:]+: (error: .+)$")
_LONGEST = 500
_END_BYTES = 1 << 18
"""Bytes of a log that are read, at its end."""
_PROBE = bytes(1 << 16)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def how_it_ended(code: int) -> str:
    """An exit code in words: a failure, or by which signal a process was killed."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"was killed by signal {-code}"
    guess = ", out of memory?" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}{guess})"


def end_of(log: Path) -> str:
    """The end of a log, from the beginning of a line; empty without one."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - _END_BYTES, 0))
        text = file.read(_END_BYTES).decode(errors="replace")
    return text if size <= _END_BYTES else text.partition("\n")[2] or text


def record_of(log: Path) -> EndRecord | None:
    """What the process that wrote a log left about its end."""
    return ends.read(ends.file_of(log))


def reason_of(log: Path) -> str:
    """Why the process that wrote a log failed, in its own words; empty without any."""
    record = record_of(log)
    return (record.reason if record else "") or died_of(log)


def died_of(log: Path) -> str:
    """The last exception of a log, or the error of its command line."""
    lines = _lines(log)
    return (_raised(lines) or usage_error(log) or _looks_raised(lines))[:_LONGEST]


def unwritable(log: Path) -> str:
    """Why nothing can be written to a log, or beside it: its end is missing; "" if it can."""
    try:
        # A file without a name needs room as any other.
        os.close(os.open(log.parent, os.O_TMPFILE | os.O_WRONLY, owned.PRIVATE_FILE))
    except OSError as error:
        if error.errno in _NO_ROOM:
            return os.strerror(error.errno)
    try:
        file = owned.append(log, owned.PRIVATE_FILE)
    except TTraceError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    size = os.fstat(file).st_size
    try:
        missing = len(_PROBE) - os.write(file, _PROBE)
        os.write(file, _PROBE[:missing])
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            owned.shorten(file, size)
        os.close(file)
    return ""


def usage_error(log: Path) -> str:
    """The last line if argparse wrote it: ``error: unrecognized arguments: --no-such-flag``."""
    lines = _lines(log)
    match = _USAGE.match(lines[-1]) if lines else None
    return match[1][:_LONGEST] if match else ""


def _lines(log: Path) -> list[str]:
    return [line for line in without_secrets(end_of(log)).splitlines() if line.strip()]


def _raised(lines: list[str]) -> str:
    """The line that ends the last traceback."""
    lines = [_RANK.sub("", line) for line in lines]
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    if not starts:
        return ""
    frames: list[str] = []
    for line in lines[starts[-1] + 1 :]:
        if not line.startswith(" "):
            # A bare "AssertionError" says nothing; the line that raised it does.
            has_text = ":" in line or not frames
            return line if has_text else f"{line}: {frames[-1].strip()}"
        if line.strip(" ^~"):
            frames.append(line)
    return ""


def _looks_raised(lines: list[str]) -> str:
    """The last line that names an exception, for a traceback that is cut off."""
    stripped = (_RANK.sub("", line) for line in reversed(lines))
    return next(filter(_ERROR.match, stripped), "")


def last_lines(log: Path) -> str:
    """The last non-empty lines of a log, indented, after what they are."""
    try:
        lines = [line[:300] for line in _lines(log)[-_TAIL_LINES:]] or [f"({log} is empty)"]
    except OSError as error:
        lines = [f"({log} cannot be read: {error})"]
    return "\n  ".join([f"its last lines, from {log}:", *lines])


def port_was_taken(log: Path) -> bool:
    """Whether a run failed because another process took its port after it was chosen."""
    with contextlib.suppress(OSError):
        return "EADDRINUSE" in end_of(log)
    return False
