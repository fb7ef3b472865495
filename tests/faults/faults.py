# SPDX-License-Identifier: Apache-2.0
"""What a fault is: a record of what is done to a real check, and what is promised all the same.

Moments are shares of a healthy run's duration, positions are shares of a file or of a list; what
they mean in seconds and bytes is known when the campaign has made its healthy runs.
"""

from __future__ import annotations

import dataclasses
import signal
from enum import StrEnum


class Family(StrEnum):
    """Kinds of faults; one row of the table each."""

    SIGNALS = "signals to the launcher"
    RANKS = "killed or stopped ranks and references"
    DISK = "disks and directories"
    CACHE = "damaged traces"
    LOCAL = "exceptions on one rank"
    TWO = "two runs at once"
    HOSTILE = "hostile names and environments"


class Target(StrEnum):
    """Whom a signal is sent to."""

    LAUNCHER = "launcher"
    GROUP = "launcher's process group"
    RANK0 = "rank 0"
    RANK1 = "rank 1"
    REFERENCE = "reference run"


class Where(StrEnum):
    """Which directory is hit."""

    DIRECTORY = "--ttrace-dir"
    CACHE = "TTRACE_CACHE"
    TMPDIR = "TMPDIR"


class Thing(StrEnum):
    """What lies where the check wants to write."""

    DIRECTORY = "a directory with a file in it"
    FILE = "a file"
    DANGLING = "a link to nowhere"
    LOOP = "a link to itself"
    OUTSIDE_FILE = "a link to somebody's file"
    OUTSIDE_DIRECTORY = "a link to somebody's directory"
    FIFO = "a FIFO that nobody reads"
    FULL = "a link to /dev/full"


class Vanishing(StrEnum):
    """How a directory goes away."""

    REMOVED = "removed"
    RENAMED = "renamed"
    COVERED = "covered by an empty read-only file system"


class Harm(StrEnum):
    """What is done to a file of a trace."""

    BIT = "one bit flipped"
    CUT = "cut off"
    EMPTY = "emptied"
    DELETED = "deleted"
    ZEROED = "256 bytes zeroed"
    LONGER = "bytes appended"
    SWAPPED = "swapped for the file of another trace"
    DIRECTORY = "a directory in its place"


class Stream(StrEnum):
    """What a standard stream is connected to."""

    FILE = "a file"
    CLOSED = "closed"
    FULL = "/dev/full"
    BROKEN = "a pipe that nobody reads"


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """Signals, ``gap`` seconds apart. With ``fresh`` the reference is being made, too."""

    target: Target
    signals: tuple[signal.Signals, ...]
    moment: float
    gap: float = 0.1
    fresh: bool = False
    cold: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """SIGSTOP; SIGCONT after ``seconds``, or never, with a short time-out."""

    target: Target
    moment: float
    seconds: float | None
    fresh: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Full:
    """A file system of so many KiB, or of so many files."""

    where: Where
    kib: int = 0
    inodes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Fill:
    """A disk that somebody else fills during the run."""

    where: Where
    moment: float


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOnly:
    """A read-only file system."""

    where: Where


@dataclasses.dataclass(frozen=True, slots=True)
class Vanish:
    """The ``--ttrace-dir`` goes away during the run."""

    how: Vanishing
    moment: float


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """Files may not grow beyond so many bytes."""

    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class InTheWay:
    """Something lies where a file of the check belongs."""

    name: str
    thing: Thing


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A file of a cached reference (``check``) or of a trace that is compared offline.

    ``side`` is the trace, ``file`` and ``position`` are shares of its list of files and of the
    file's bits.
    """

    offline: bool
    side: str
    file: float
    position: float
    harm: Harm


@dataclasses.dataclass(frozen=True, slots=True)
class Raise:
    """An exception in a function of ours that a healthy run calls, on one rank.

    ``function`` and ``call`` are shares of the list of functions and of the function's calls.
    """

    function: float
    call: float
    rank: int
    error: str
    exits: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Two:
    """A second check, ``delay`` (a share of a run) after the first, of one directory or cache.

    ``faulty`` says which of the two trains wrongly; with ``killed`` the first is killed first.
    """

    share: Where
    faulty: tuple[bool, bool]
    delay: float
    killed: bool = False
    fresh: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Hostile:
    """Unusual names, variables and streams.

    ``directory`` is the name of the ``--ttrace-dir``, ``home`` that of the working directory.
    """

    directory: str = "out"
    home: str = ""
    script: str = ""
    variables: tuple[tuple[str, str | None], ...] = ()
    stdin: Stream = Stream.FILE
    stdout: Stream = Stream.FILE
    stderr: Stream = Stream.FILE
    cold: bool = False


Action = (
    Signal
    | Stop
    | Full
    | Fill
    | ReadOnly
    | Vanish
    | Limit
    | InTheWay
    | Damage
    | Raise
    | Two
    | Hostile
)


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    """What is promised: the right verdict, if ``verdict``, or one of ``codes``.

    ``reason`` is a pattern that the line of an exit code 2 must match.
    """

    codes: tuple[int, ...] = (2,)
    verdict: bool = True
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``faulty``: the candidate has a known bug, so that 0 is wrong; else 1 is."""

    id: str
    family: Family
    action: Action
    promise: Promise
    faulty: bool
    rerun: bool = False

    @property
    def what(self) -> str:
        """What is done, in words."""
        said = []
        for field in dataclasses.fields(self.action):
            value = getattr(self.action, field.name)
            if value not in ("", (), None, False):
                said.append(f"{field.name} {value!s}")
        candidate = "faulty" if self.faulty else "healthy"
        return f"{candidate} candidate, {type(self.action).__name__}: {', '.join(said)}"
