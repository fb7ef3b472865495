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
from typing import Any

from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Fault, action, changed
from tests.assay.faults.processes import Command, Started, Stream, Target
from tests.assay.planted.train import SCRIPT
from tests.trace.test_owned import state_of

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


def uses_other(fault: Fault) -> bool:
    """Whether it takes files of the baseline's run of another configuration."""
    taken = (Harm.SWAPPED, Thing.OUTSIDE_DIRECTORY)
    return any(value in taken for value in fault.action.arguments.values())


@action
def signals(
    x: Experiment,
    target: Target,
    numbers: tuple[signal.Signals, ...],
    moment: float,
    gap: float = 0.1,
    fresh: bool = False,
    cold: bool = False,
    layout: str = "",
) -> None:
    """Signals, ``gap`` seconds apart. With ``fresh`` the reference is being made, too."""
    started = x.begin(fresh=fresh, layout=layout, cold=cold)
    pid = x.target(started, target, moment, x.seconds_of(fresh=fresh, cold=cold))
    if pid is not None:
        for position, number in enumerate(numbers):
            if position and started.wait(gap):
                break
            x.injected |= x.send(started, pid, number, group=target is Target.GROUP)
    x.watch(started)


@action
def stop(
    x: Experiment,
    target: Target,
    moment: float,
    seconds: float | None,
    fresh: bool = False,
    layout: str = "",
) -> None:
    """SIGSTOP; SIGCONT after ``seconds``, or never, with a short time-out."""
    expected = x.seconds_of(fresh=fresh)
    patience = max(5.0, 2.5 * expected)
    flags = () if seconds is not None else ("--ttrace-timeout", f"{patience:.1f}")
    started = x.begin(*flags, fresh=fresh, layout=layout)
    pid = x.target(started, target, moment, expected)
    if pid is not None:
        x.injected = x.send(started, pid, signal.SIGSTOP)
        if seconds is not None:
            started.wait(seconds)
            # A helper may outlive its launcher.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    # The reference, the ranks and the launcher may wait one after the other.
    x.watch(started, limit=None if seconds is not None else 2 * patience + 40)


@action
def full(
    x: Experiment,
    where: Where,
    kib: int = _ROOM_KIB,
    inodes: int = 0,
    moment: float | None = None,
    fresh: bool = True,
    layout: str = "",
) -> None:
    """A small file system; with a ``moment`` it is large, and somebody else fills it then.

    It has so many KiB (0: it is read-only), or so many files.
    """
    if not x.mounts:
        return
    path = x.home / where
    options = f"size={kib}k" if kib else "ro"
    x.mount(path, f"nr_inodes={inodes}" if inodes else options)
    more: dict[str, Any] = {}
    if where is Where.CACHE:
        more["cache"] = path
    if where is Where.TMPDIR:
        more["variables"] = {"TMPDIR": str(path)}
    started = x.begin(fresh=fresh, layout=layout, **more)
    x.injected = moment is None or x.until(started, moment, x.seconds_of(fresh=fresh))
    if moment is not None:
        with contextlib.suppress(OSError), (path / "filler").open("wb", 0) as filler:
            while True:
                filler.write(bytes(4096))
    x.watch(started)


@action
def vanish(
    x: Experiment, how: Vanishing, moment: float, fresh: bool = False, layout: str = ""
) -> None:
    """The ``--ttrace-dir`` goes away during the run."""
    out = x.home / "out"
    if how is Vanishing.COVERED and not x.mounts:
        return
    started = x.begin(fresh=fresh, layout=layout)
    x.injected = x.until(started, moment, x.seconds_of(fresh=fresh))
    if how is Vanishing.COVERED:
        x.mount(out, "ro")
    elif how is Vanishing.RENAMED:
        with contextlib.suppress(OSError):
            out.rename(x.home / "elsewhere")
    else:
        shutil.rmtree(out, ignore_errors=True)
    x.watch(started, report=False)


@action
def limit(x: Experiment, size: int) -> None:
    """Files may not grow beyond so many bytes."""
    x.injected = True
    x.watch(Started(x.check(fresh=True, limit=size)))


@action
def in_the_way(x: Experiment, name: str, thing: Thing) -> None:
    """Something lies where a file of the check belongs; what a link leads to stays as it is."""
    place, victim = x.home / "out" / name, x.home / "victim"
    place.parent.mkdir(parents=True, exist_ok=True)
    victim.mkdir()
    (victim / "precious.txt").write_text("precious")
    if thing is Thing.OUTSIDE_DIRECTORY and name == "reference":
        # A complete trace of another configuration: somebody's cache entry.
        shutil.copytree(entry(x.base.folder / "other"), victim, dirs_exist_ok=True)
    if place.exists():
        place.rmdir()
    match thing:
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
            place.symlink_to(targets[thing])
    before = state_of(victim)
    x.injected = True
    x.watch(Started(x.check(fresh=True)))
    x.problems += changed(before, victim, new=True)


@action
def damage(
    x: Experiment,
    harm: Harm,
    side: str = "reference",
    file: float = 0.0,
    position: float = 0.5,
    offline: bool = False,
) -> None:
    """Damage a file of a cached reference, or of a ``side`` of traces that are compared offline.

    ``file`` and ``position`` are shares of the list of files and of the file's bits.
    """
    if offline:
        name = "faulty" if x.fault.faulty else "healthy"
        for folder in ("reference", "candidate"):
            shutil.copytree((x.base.folder / name / "out" / folder).resolve(), x.home / folder)
        trace = x.home / side
        words = ("compare", "reference", "candidate", "--output", "out")
        command = Command(words=words, home=x.home)
    else:
        command = x.check()
        trace = entry(x.home / "cache")
    files = sorted(p for p in trace.iterdir() if p.suffix in (".safetensors", ".jsonl"))
    files.append(trace / "meta.json")
    chosen = files[int(file * len(files))]
    x.injected = spoil(chosen, harm, x.base.folder / "other", position)
    x.output = chosen.name
    if x.injected:
        x.watch(Started(command))


@action
def damage_in_use(
    x: Experiment, harm: Harm, moment: float, fresh: bool = False, layout: str = ""
) -> None:
    """All tensors of the reference are damaged while they are in use."""
    started = x.begin(fresh=fresh, layout=layout)
    files: set[Path] = set()

    def there() -> bool:
        """Whether there is a reference by now."""
        folders = (x.home / "cache", x.home / "out")
        paths = (path for folder in folders for path in folder.rglob("*.safetensors"))
        with contextlib.suppress(OSError):
            files.update(path.resolve() for path in paths)
        return bool(files)

    if x.until(started, moment, x.seconds_of(fresh=fresh)):
        started.wait(x.limit, there)
        x.injected = bool(files) and started.code is None
        for file in files:
            with contextlib.suppress(OSError):
                spoil(file, harm, x.base.folder / "other")
    x.watch(started, limit=2 * x.limit)


def spoil(file: Path, harm: Harm, other: Path, position: float = 0.5) -> bool:
    """Damage a file in place; returns whether it has other bytes now."""
    before = file.read_bytes()
    data = bytearray(before)
    at = int(position * len(data))
    match harm:
        case Harm.BIT:
            data[at] ^= 1 << int(position * len(data) * 8) % 8
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
            others = list(other.glob(f"*/{file.name}"))
            data = bytearray(others[0].read_bytes()) if others else data
        case _:
            file.unlink()
            if harm is Harm.DIRECTORY:
                file.mkdir()
            if harm is Harm.FIFO:
                os.mkfifo(file)
            return True
    # Whoever has it mapped sees the change.
    with file.open("r+b") as opened:
        opened.truncate(len(data))
        opened.write(data)
    return bytes(data) != before


@action
def two(
    x: Experiment,
    share: Where,
    faulty: tuple[bool, bool],
    delay: float,
    killed: bool = False,
    fresh: bool = True,
) -> None:
    """A second check, ``delay`` (a share of a run) after the first, of one directory or cache.

    ``faulty`` says which of the two trains wrongly; with ``killed`` the first is killed first.
    """
    caches = share is Where.CACHE
    cache = (x.home / "cache" if fresh else x.cache()) if caches else None
    runs: list[Started] = []
    for number, is_faulty in enumerate(faulty):
        directory = f"out{number}" if caches else "out"
        command = x.check(
            fresh=True, faulty=is_faulty, cache=cache, directory=directory, name=f"run{number}"
        )
        runs.append(Started(command))
        if number == 0 and delay:
            runs[0].wait(delay * x.seconds_of(fresh=fresh))
            if killed:
                x.send(runs[0], runs[0].pid, signal.SIGKILL)
    x.injected = True
    deadline = time.monotonic() + x.limit
    for run in runs:
        run.wait(deadline - time.monotonic())
    for run, is_faulty in list(zip(runs, faulty, strict=True))[int(killed) :]:
        x.judge(run, faulty=is_faulty, report=caches)
    x.orphans()


@action
def hostile(
    x: Experiment,
    directory: str = "out",
    home: str = "",
    script: str = "",
    variables: tuple[tuple[str, str | None], ...] = (),
    stdin: Stream = Stream.FILE,
    stdout: Stream = Stream.FILE,
    stderr: Stream = Stream.FILE,
    cold: bool = False,
) -> None:
    """Unusual names, variables and streams.

    ``directory`` is the name of the ``--ttrace-dir``, ``home`` that of the working directory.
    """
    root = SCRIPT.parents[1]
    place = x.home / home if home else x.home
    place.mkdir(parents=True, exist_ok=True)
    command = x.check(
        directory=directory,
        variables={name: value and value.format(root=root) for name, value in variables},
        script=script or SCRIPT,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cold=cold,
    )
    x.injected = True
    x.watch(Started(dataclasses.replace(command, home=place)))


def entry(cache: Path) -> Path:
    """The one reference in a cache."""
    return next(path.parent for path in sorted(cache.glob("*/meta.json")))
