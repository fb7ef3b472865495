# SPDX-License-Identifier: Apache-2.0
"""What is done to a real check: signals, disks, damaged traces, a second run, odd surroundings.

Moments are shares of a healthy run's duration, positions are shares of a file or of a list; what
they mean in seconds and bytes is known when the campaign has made its healthy runs.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import time
from enum import StrEnum
from pathlib import Path

from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import changed, state_of
from tests.assay.faults.processes import Command, Started, Stream, Target
from tests.assay.planted.train import SCRIPT

_ROOM_KIB = 16 << 10


class Where(StrEnum):
    """Which directory is hit: its name below the working directory."""

    DIRECTORY = "out"
    CACHE = "cache"
    TMPDIR = "tmp"


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
    FIFO = "a FIFO in its place"
    OVERWRITTEN = "overwritten with other bytes from the position on"


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """Signals, ``gap`` seconds apart. With ``fresh`` the reference is being made, too."""

    target: Target
    signals: tuple[signal.Signals, ...]
    moment: float
    gap: float = 0.1
    fresh: bool = False
    cold: bool = False

    def inject(self, experiment: Experiment) -> None:
        """Wait, and send them."""
        x = experiment
        started = Started(x.check(fresh=self.fresh, cold=self.cold))
        expected = x.seconds_of(fresh=self.fresh, cold=self.cold)
        pid = x.target(started, self.target, self.moment, expected)
        if pid is not None:
            for position, number in enumerate(self.signals):
                if position and started.wait(self.gap):
                    break
                is_group = self.target is Target.GROUP
                x.injected |= x.send(started, pid, number, group=is_group)
        x.watch(started)


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """SIGSTOP; SIGCONT after ``seconds``, or never, with a short time-out."""

    target: Target
    moment: float
    seconds: float | None
    fresh: bool = False

    def inject(self, experiment: Experiment) -> None:
        """Wait, and stop it."""
        x = experiment
        expected = x.seconds_of(fresh=self.fresh)
        patience = max(5.0, 2.5 * expected)
        flags = () if self.seconds is not None else ("--ttrace-timeout", f"{patience:.1f}")
        started = Started(x.check(*flags, fresh=self.fresh))
        pid = x.target(started, self.target, self.moment, expected)
        if pid is not None:
            x.injected = x.send(started, pid, signal.SIGSTOP)
            if self.seconds is not None:
                started.wait(self.seconds)
                x.send(started, pid, signal.SIGCONT)
        # The reference, the ranks and the launcher may wait one after the other.
        x.watch(started, limit=None if self.seconds is not None else 2 * patience + 40)


@dataclasses.dataclass(frozen=True, slots=True)
class Full:
    """A file system of so many KiB, or of so many files; or a read-only one.

    With a ``moment`` it is large, and somebody else fills it then.
    """

    where: Where
    kib: int = _ROOM_KIB
    inodes: int = 0
    read_only: bool = False
    moment: float | None = None

    def mount(self, experiment: Experiment) -> Path:
        """Mount it."""
        path = experiment.home / self.where
        options = "ro" if self.read_only else f"size={self.kib}k"
        experiment.mount(path, f"nr_inodes={self.inodes}" if self.inodes else options)
        return path

    def inject(self, experiment: Experiment) -> None:
        """Check in it."""
        x = experiment
        if not x.mounts:
            return
        path = self.mount(x)
        more: dict[str, object] = {}
        if self.where is Where.CACHE:
            more["cache"] = path
        if self.where is Where.TMPDIR:
            more["variables"] = {"TMPDIR": str(path)}
        started = Started(x.check(fresh=True, **more))
        x.injected = self.moment is None or x.until(started, self.moment, x.base.fresh)
        if self.moment is not None:
            fill(path)
        x.watch(started)


def fill(folder: Path) -> None:
    """Leave no room."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", 0) as filler:
        while True:
            filler.write(bytes(4096))


@dataclasses.dataclass(frozen=True, slots=True)
class Vanish:
    """The ``--ttrace-dir`` goes away during the run."""

    how: Vanishing
    moment: float

    def inject(self, experiment: Experiment) -> None:
        """Wait, and take it away."""
        x, out = experiment, experiment.home / "out"
        if self.how is Vanishing.COVERED and not x.mounts:
            return
        started = Started(x.check())
        x.injected = x.until(started, self.moment, x.base.cached)
        if self.how is Vanishing.COVERED:
            x.mount(out, "ro")
        elif self.how is Vanishing.RENAMED:
            with contextlib.suppress(OSError):
                out.rename(x.home / "elsewhere")
        else:
            shutil.rmtree(out, ignore_errors=True)
        x.watch(started, report=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """Files may not grow beyond so many bytes."""

    size: int

    def inject(self, experiment: Experiment) -> None:
        """Check."""
        experiment.injected = True
        experiment.watch(Started(experiment.check(fresh=True, limit=self.size)))


@dataclasses.dataclass(frozen=True, slots=True)
class InTheWay:
    """Something lies where a file of the check belongs."""

    name: str
    thing: Thing

    def inject(self, experiment: Experiment) -> None:
        """Check; what a link leads to stays as it is."""
        x, place = experiment, experiment.home / "out" / self.name
        place.parent.mkdir(parents=True, exist_ok=True)
        victim = x.home / "victim"
        victim.mkdir()
        (victim / "precious.txt").write_text("precious")
        if self.thing is Thing.OUTSIDE_DIRECTORY and self.name == "reference":
            # A complete trace of another configuration: somebody's cache entry.
            shutil.copytree(entry(x.base.folder / "other"), victim, dirs_exist_ok=True)
        if place.exists():
            place.rmdir()
        match self.thing:
            case Thing.DIRECTORY:
                place.mkdir()
                (place / "file").write_text("")
            case Thing.FILE:
                place.write_text("")
            case Thing.FIFO:
                os.mkfifo(place)
            case _:
                targets = {
                    Thing.DANGLING: x.home / "nowhere" / "at-all",
                    Thing.LOOP: place,
                    Thing.OUTSIDE_FILE: victim / "precious.txt",
                    Thing.OUTSIDE_DIRECTORY: victim,
                    Thing.FULL: Path("/dev/full"),
                }
                place.symlink_to(targets[self.thing])
        before = state_of(victim)
        x.injected = True
        x.watch(Started(x.check(fresh=True)))
        x.problems += changed(before, victim, new=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A file of a cached reference (``check``) or of a trace that is compared offline.

    ``side`` is the trace, ``file`` and ``position`` are shares of its list of files and of the
    file's bits. With a ``moment``, all tensors of the reference are damaged while they are in use.
    """

    harm: Harm
    side: str = "reference"
    file: float = 0.0
    position: float = 0.5
    offline: bool = False
    moment: float | None = None

    def inject(self, experiment: Experiment) -> None:
        """Damage, and compare."""
        x = experiment
        if self.moment is not None:
            started = Started(x.check())
            x.injected = x.until(started, self.moment, x.base.cached)
            for file in sorted((x.home / "cache").rglob("*.safetensors")):
                self.spoil(file, x)
            x.watch(started, limit=2 * x.limit)
            return
        if not self.offline:
            command = x.check()
            trace = entry(x.home / "cache")
        else:
            name = "faulty" if x.fault.faulty else "healthy"
            for side in ("reference", "candidate"):
                source = (x.base.folder / name / "out" / side).resolve()
                shutil.copytree(source, x.home / side)
            trace = x.home / self.side
            words = ("compare", "reference", "candidate", "--output", "out")
            command = Command(words=words, home=x.home)
        files = sorted(p for p in trace.iterdir() if p.suffix in (".safetensors", ".jsonl"))
        files.append(trace / "meta.json")
        file = files[int(self.file * len(files))]
        x.injected = self.spoil(file, x)
        x.said = file.name
        if x.injected:
            x.watch(Started(command))

    def spoil(self, file: Path, experiment: Experiment) -> bool:
        """Damage a file in place; returns whether it has other bytes now."""
        before = file.read_bytes()
        data = bytearray(before)
        at = int(self.position * len(data))
        match self.harm:
            case Harm.BIT:
                data[at] ^= 1 << int(self.position * len(data) * 8) % 8
            case Harm.CUT:
                del data[at:]
            case Harm.EMPTY:
                data.clear()
            case Harm.ZEROED:
                data[at : at + 256] = bytes(len(data[at : at + 256]))
            case Harm.OVERWRITTEN:
                data[at:] = os.urandom(len(data) - at)
            case Harm.LONGER:
                data += b"{}\n\0"
            case Harm.SWAPPED:
                others = list((experiment.base.folder / "other").glob(f"*/{file.name}"))
                data = bytearray(others[0].read_bytes()) if others else data
            case _:
                file.unlink()
                if self.harm is Harm.DIRECTORY:
                    file.mkdir()
                if self.harm is Harm.FIFO:
                    os.mkfifo(file)
                return True
        # Whoever has it mapped sees the change.
        with file.open("r+b") as opened:
            opened.truncate(len(data))
            opened.write(data)
        return bytes(data) != before


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

    def inject(self, experiment: Experiment) -> None:
        """Start both."""
        x = experiment
        caches = self.share is Where.CACHE
        cache = (x.home / "cache" if self.fresh else x.cache()) if caches else None
        started: list[Started] = []
        for number, faulty in enumerate(self.faulty):
            command = x.check(
                fresh=True,
                faulty=faulty,
                cache=cache,
                directory=f"out{number}" if caches else "out",
                name=f"run{number}",
            )
            started.append(Started(command))
            if number == 0 and self.delay:
                started[0].wait(self.delay * x.seconds_of(fresh=self.fresh))
                if self.killed:
                    x.send(started[0], started[0].pid, signal.SIGKILL)
        x.injected = True
        deadline = time.monotonic() + x.limit
        for run in started:
            run.wait(deadline - time.monotonic())
        for run, faulty in list(zip(started, self.faulty, strict=True))[int(self.killed) :]:
            x.judge(run, faulty=faulty, report=caches)
        x.orphans()


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

    def inject(self, experiment: Experiment) -> None:
        """Check in them."""
        x = experiment
        home = x.home / self.home if self.home else x.home
        home.mkdir(parents=True, exist_ok=True)
        command = x.check(
            directory=self.directory,
            variables={
                name: value and value.format(root=SCRIPT.parents[1])
                for name, value in self.variables
            },
            script=self.script or SCRIPT,
            stdin=self.stdin,
            stdout=self.stdout,
            stderr=self.stderr,
            cold=self.cold,
        )
        x.injected = True
        x.watch(Started(dataclasses.replace(command, home=home)))


def entry(cache: Path) -> Path:
    """The one reference in a cache."""
    return next(path.parent for path in sorted(cache.glob("*/meta.json")))
