# SPDX-License-Identifier: Apache-2.0
"""How a process of ours ended: a record that it writes, for the process that started it.

The starting process names a file in the environment (:func:`announced`). The process that ends
writes it once (:func:`write`): the first reason is the cause, whatever fails after it. A process
that is killed or aborts leaves no record.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.codec import Count
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

VARIABLE = "TTRACE_END_FILE"
_MOST_FRAMES = 16
_MOST_LINES = 20
_MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A place in the code: a file as it is shown, a line, a function."""

    file: str
    line: Count
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """How a process ended.

    Attributes:
        at: when it failed, in nanoseconds since the epoch.
        message: the exception's, in one line, or what we report (its details in further lines).
        error: the type of the exception; empty for a message of ours.
        frames: where it was raised, innermost first: code of Megatron and of the script.
        follows: whether it ended because another rank did.
        finding: the number of a known fault of Megatron's in docs/findings.md; 0 for none.
        advice: what helps against that.
    """

    code: int
    at: Count
    message: str = ""
    error: str = ""
    frames: tuple[Frame, ...] = ()
    follows: bool = False
    finding: Count = 0
    advice: str = ""

    @property
    def reason(self) -> str:
        """Why, in one line; of a message of ours with its details. Empty if nothing is known."""
        if not self.error:
            lines = self.message.splitlines()[:_MOST_LINES]
            return "\n".join(clean(line, NOTE_LIMIT) for line in lines)
        message = self.message.rstrip(". ")
        text = clean(f"{self.error}: {message}" if message else self.error, NOTE_LIMIT)
        where = f", at {clean(self.frames[0], NOTE_LIMIT)}" if self.frames else ""
        known = f" [finding {self.finding} of docs/findings.md: {self.advice}]"
        return text + where + (known if self.finding else "")


class _State:
    """Of this process."""

    file: Path | None = None


def file_of(log: Path) -> Path:
    """The record of the process that writes a log."""
    return log.with_suffix(".end.json")


def announced(file: Path) -> dict[str, str]:
    """The environment of a process that is to leave its record in ``file``; an old one goes."""
    owned.remove(file)
    return {VARIABLE: str(file.absolute())}


def begin() -> None:
    """At the start of a process: take the place of the record, which no child inherits."""
    file = os.environ.pop(VARIABLE, "")
    _State.file = Path(file) if file else None


def write(record: EndRecord) -> None:
    """Leave a record, if one is awaited and there is none; never raises."""
    if _State.file is None or _State.file.exists():
        return
    record = dataclasses.replace(
        record,
        at=record.at or time.time_ns(),
        frames=record.frames[:_MOST_FRAMES],
    )
    try:
        text = json.dumps(codec.encode(record))
        owned.write(_State.file, [text], owned.PRIVATE_FILE, sealed=False)
    except (OSError, ValueError, owned.ForeignError):
        _State.file = None


def tell(message: str, code: int = 2, *, follows: bool = False) -> None:
    """Print why this process ends, and leave it as the record.

    The process that reads the record reports it, so it does not repeat the line as progress.
    """
    start = "ttrace" if _State.file is None else "ttrace ends"
    print(f"{start}: {message}", file=sys.stderr, flush=True)
    write(EndRecord(code=code, at=0, message=message, follows=follows))


def read(file: Path) -> EndRecord | None:
    """The record in a file, ``None`` if there is none that is intact."""
    try:
        return codec.decode(EndRecord, codec.parse(codec.read(file, _MOST_BYTES)))
    except (OSError, ValueError):
        return None
