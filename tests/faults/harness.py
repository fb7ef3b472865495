# SPDX-License-Identifier: Apache-2.0
"""Inject one fault into a real run, in a fresh directory, and say whether the promises held."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.faults import baseline
from tests.faults.baseline import Baseline, check
from tests.faults.faults import (
    Damage,
    Fault,
    Fill,
    Full,
    Harm,
    Hostile,
    InTheWay,
    Limit,
    Raise,
    ReadOnly,
    Signal,
    Stop,
    Target,
    Thing,
    Two,
    Vanish,
    Vanishing,
    Where,
)
from tests.faults.judging import Problem, Row, of_command, of_training, text
from tests.faults.processes import Command, Started, bury
from tests.planted import train as training

LIMIT = 60.0
COLD_LIMIT = 150.0
"""Seconds after which a run counts as hanging; a cold start reads a thousand modules first."""
ORPHAN_SECONDS = 5.0
ATTEMPTS = 3
"""How often a moment is tried that came after the end: the machine has become faster."""
_ROOM_KIB = 16 << 10


class Experiment:
    """One fault in one directory."""

    def __init__(self, fault: Fault, base: Baseline, home: Path, *, mounts: bool) -> None:
        self.fault = fault
        self.base = base
        self.home = home
        self.mounts = mounts
        self.injected = False
        self.problems: list[tuple[Problem, str]] = []
        self.codes: list[int | None] = []
        self._mounted: list[Path] = []
        self._said = ""
        self._seconds: float | None = None

    def run(self) -> Row:
        """Inject, observe, clean up."""
        began = time.monotonic()
        try:
            for _ in range(ATTEMPTS):
                self._unmount()
                shutil.rmtree(self.home, ignore_errors=True)
                self.home.mkdir(parents=True)
                self.codes, self._said = [], ""
                self._inject()
                if self.injected or self.problems or not self._too_late():
                    break
            if self.fault.rerun and self.injected:
                self._unmount()
                self._rerun()
        finally:
            bury(0)
            self._unmount()
        if not self.problems:
            shutil.rmtree(self.home, ignore_errors=True)
        return Row(
            self.fault.id,
            self.fault.family,
            self.fault.what,
            self.injected,
            tuple(self.codes),
            tuple(self.problems),
            self._said,
            time.monotonic() - began,
        )

    def _inject(self) -> None:
        match self.fault.action:
            case Signal() as action:
                self._signal(action)
            case Stop() as action:
                self._stop(action)
            case Full() | Fill() | ReadOnly() as action:
                self._file_system(action)
            case Vanish() as action:
                self._vanish(action)
            case Limit() as action:
                self.injected = True
                self._watch(Started(self._check(fresh=True, limit=action.size)))
            case InTheWay() as action:
                self._in_the_way(action)
            case Damage() as action:
                self._damage(action)
            case Raise() as action:
                self._raise(action)
            case Two() as action:
                self._two(action)
            case Hostile() as action:
                self._hostile(action)

    def _too_late(self) -> bool:
        """Whether the run ended before its moment, and was faster than the healthy ones."""
        action = self.fault.action
        if self._seconds is None or not isinstance(action, Signal | Stop | Fill | Vanish):
            return False
        fresh = getattr(action, "fresh", isinstance(action, Fill))
        expected = self.base.fresh if fresh else self.base.cached
        if getattr(action, "cold", False):
            expected += self.base.start
        share = self._seconds / expected
        if share >= 1:
            return False
        self.base = dataclasses.replace(
            self.base,
            **{name: share * getattr(self.base, name) for name in ("fresh", "cached", "start")},
        )
        return True

    # --- what is done ---------------------------------------------------------------------------

    def _check(self, *flags: str, fresh: bool = False, **more: object) -> Command:
        """The check under test; without ``fresh`` it finds its reference in a cache of its own."""
        more.setdefault("faulty", self.fault.faulty)
        if not fresh:
            more.setdefault("cache", self._cache())
        return check(self.home, *flags, **more)  # type: ignore[arg-type]

    def _cache(self) -> Path:
        copy = self.home / "cache"
        shutil.copytree(self.base.folder / "cache", copy, dirs_exist_ok=True)
        return copy

    def _moment(self, share: float, *, fresh: bool, cold: bool = False) -> float:
        start = self.base.start if cold else 0.0
        return start * share + share * (self.base.fresh if fresh else self.base.cached)

    def _signal(self, action: Signal) -> None:
        started = Started(self._check(fresh=action.fresh, cold=action.cold))
        pid = self._await(started, action.target, action.moment, action.fresh, action.cold)
        if pid is not None:
            for number, one in enumerate(action.signals):
                if number and started.wait(action.gap):
                    break
                self.injected |= self._send(started, pid, one, group=action.target is Target.GROUP)
        self._watch(started)

    def _stop(self, action: Stop) -> None:
        forever = action.seconds is None
        healthy = self.base.fresh if action.fresh else self.base.cached
        seconds = max(5.0, 2.5 * healthy)
        flags = ("--ttrace-timeout", f"{seconds:.1f}") if forever else ()
        started = Started(self._check(*flags, fresh=action.fresh))
        pid = self._await(started, action.target, action.moment, action.fresh)
        if pid is not None:
            self.injected = self._send(started, pid, signal.SIGSTOP)
            if action.seconds is not None:
                started.wait(action.seconds)
                self._send(started, pid, signal.SIGCONT)
        # The reference, the ranks and the launcher may wait one after the other.
        self._watch(started, limit=2 * seconds + 40 if forever else None)

    def _await(
        self, started: Started, target: Target, share: float, fresh: bool, cold: bool = False
    ) -> int | None:
        """Wait for a moment, and then for the target to be there."""
        moment = self._moment(share, fresh=fresh, cold=cold)
        if started.wait(moment - (time.monotonic() - started.began)):
            return None
        found: list[int] = []

        def there() -> bool:
            pid = started.find(target)
            found.extend([] if pid is None else [pid])
            return pid is not None

        started.wait(LIMIT, there)
        return found[0] if found and started.code is None else None

    @staticmethod
    def _send(started: Started, pid: int, number: signal.Signals, *, group: bool = False) -> bool:
        if started.code is not None:
            return False
        try:
            (os.killpg if group else os.kill)(pid, number)
        except ProcessLookupError:
            return False
        return True

    def _file_system(self, action: Full | Fill | ReadOnly) -> None:
        if not self.mounts:
            return
        path = (
            self.home
            / {Where.DIRECTORY: "out", Where.CACHE: "cache", Where.TMPDIR: "tmp"}[action.where]
        )
        options = f"size={_ROOM_KIB}k"
        if isinstance(action, Full):
            options = f"size={action.kib}k" if action.kib else f"nr_inodes={action.inodes}"
        elif isinstance(action, ReadOnly):
            options = "ro"
        self._mount(path, options)
        more: dict[str, object] = {}
        if action.where is Where.CACHE:
            more["cache"] = path
        if action.where is Where.TMPDIR:
            more["variables"] = {"TMPDIR": str(path)}
        started = Started(self._check(fresh=True, **more))
        self.injected = True
        if isinstance(action, Fill):
            self.injected = not started.wait(self._moment(action.moment, fresh=True))
            with contextlib.suppress(OSError), (path / "filler").open("wb", 0) as filler:
                while True:
                    filler.write(bytes(4096))
        self._watch(started)

    def _vanish(self, action: Vanish) -> None:
        out = self.home / "out"
        if action.how is Vanishing.COVERED and not self.mounts:
            return
        started = Started(self._check())
        self.injected = not started.wait(self._moment(action.moment, fresh=False))
        if action.how is Vanishing.COVERED:
            out.mkdir(exist_ok=True)
            self._mount(out, "ro")
        elif action.how is Vanishing.RENAMED:
            with contextlib.suppress(OSError):
                out.rename(self.home / "elsewhere")
        else:
            shutil.rmtree(out, ignore_errors=True)
        self._watch(started, report=False)

    def _in_the_way(self, action: InTheWay) -> None:
        place = self.home / "out" / action.name
        place.parent.mkdir(parents=True, exist_ok=True)
        victim = self.home / "victim"
        victim.mkdir()
        (victim / "precious.txt").write_text("precious")
        if action.thing is Thing.OUTSIDE_DIRECTORY and action.name == "reference":
            # A complete trace of another configuration: somebody's cache entry.
            entry = _entry(self.base.folder / "other")
            shutil.copytree(entry, victim, dirs_exist_ok=True)
        if place.exists():
            place.rmdir()
        match action.thing:
            case Thing.DIRECTORY:
                place.mkdir()
                (place / "file").write_text("")
            case Thing.FILE:
                place.write_text("")
            case Thing.FIFO:
                os.mkfifo(place)
            case _:
                targets = {
                    Thing.DANGLING: self.home / "nowhere" / "at-all",
                    Thing.LOOP: place,
                    Thing.OUTSIDE_FILE: victim / "precious.txt",
                    Thing.OUTSIDE_DIRECTORY: victim,
                    Thing.FULL: Path("/dev/full"),
                }
                place.symlink_to(targets[action.thing])
        before = _digest(victim)
        self.injected = True
        self._watch(Started(self._check(fresh=True)))
        if _digest(victim) != before:
            self._problem(Problem.HARMED, "what a link led to was changed")

    def _damage(self, action: Damage) -> None:
        if not action.offline:
            command = self._check()
            trace = _entry(self.home / "cache")
        else:
            name = "faulty" if self.fault.faulty else "healthy"
            for side in ("reference", "candidate"):
                source = (self.base.folder / name / "out" / side).resolve()
                shutil.copytree(source, self.home / side)
            trace = self.home / action.side
            words = ("compare", "reference", "candidate", "--output", "out")
            command = Command(words=words, home=self.home)
        files = sorted(p for p in trace.iterdir() if p.suffix in (".safetensors", ".jsonl"))
        files.append(trace / "meta.json")
        file = files[int(action.file * len(files))]
        self.injected = self._spoil(file, action, trace)
        self._said = file.name
        if self.injected:
            self._watch(Started(command))

    def _spoil(self, file: Path, action: Damage, trace: Path) -> bool:
        before = file.read_bytes()
        data = bytearray(before)
        at = int(action.position * len(data))
        match action.harm:
            case Harm.BIT:
                data[at] ^= 1 << int(action.position * len(data) * 8) % 8
            case Harm.CUT:
                del data[at:]
            case Harm.EMPTY:
                data.clear()
            case Harm.ZEROED:
                data[at : at + 256] = bytes(len(data[at : at + 256]))
            case Harm.LONGER:
                data += b"{}\n\0"
            case Harm.SWAPPED:
                found = list((self.base.folder / "other").glob(f"*/{file.name}"))
                data = bytearray(found[0].read_bytes()) if found else data
            case Harm.DELETED | Harm.DIRECTORY:
                file.unlink()
                if action.harm is Harm.DIRECTORY:
                    file.mkdir()
                return True
        file.write_bytes(data)
        return bytes(data) != before

    def _raise(self, action: Raise) -> None:
        functions = self.base.functions[action.rank]
        name, count = functions[int(action.function * len(functions))]
        call = 1 + int(action.call * count)
        mark = self.home / "raised.txt"
        mine = {"function": name, "call": call, "error": action.error, "mark": str(mark)}
        order = {str(action.rank): {"raise": mine}}
        self._said = f"{name} call {call}"
        local = self.home / "local"
        shutil.copytree(self.base.folder / "local", local)
        if action.exits:
            script = Path(training.__file__)
            self._watch(
                Started(
                    self._check(
                        cache=local, script=script, variables={training.ORDER: json.dumps(order)}
                    )
                )
            )
            self.injected = mark.is_file()
            return
        codes, hung = baseline.train(
            self.home,
            {"bits": True, **order},
            *("--ttrace", "--ttrace-no-wandb", "--ttrace-dir", "out"),
            cache=local,
            limit=LIMIT,
        )
        self.codes += codes
        self.injected = mark.is_file()
        if self.injected or hung:
            logs = sorted(self.home.glob("rank-*.std*.txt"))
            self.problems += of_training(
                codes,
                hung=hung,
                said="".join(map(text, logs)),
                logged=baseline.bits_of(self.home),
                expected=self.base.bits,
            )

    def _two(self, action: Two) -> None:
        caches = action.share is Where.CACHE
        cache = (self.home / "cache" if action.fresh else self._cache()) if caches else None
        moment = self._moment(action.delay, fresh=action.fresh)
        started: list[Started] = []
        for number, faulty in enumerate(action.faulty):
            directory = f"out{number}" if caches else "out"
            command = self._check(
                fresh=True, faulty=faulty, cache=cache, directory=directory, name=f"run{number}"
            )
            started.append(Started(command))
            if number == 0 and action.delay:
                started[0].wait(moment)
                if action.killed:
                    self._send(started[0], started[0].pid, signal.SIGKILL)
        self.injected = True
        deadline = time.monotonic() + LIMIT
        for one in started:
            one.wait(deadline - time.monotonic())
        for number, (one, faulty) in enumerate(zip(started, action.faulty, strict=True)):
            if number == 0 and action.killed:
                continue
            self._judge(one, faulty=faulty, report=caches)
        self._orphans()

    def _hostile(self, action: Hostile) -> None:
        home = self.home / action.home if action.home else self.home
        home.mkdir(parents=True, exist_ok=True)
        variables = {
            name: None if value is None else value.format(root=training.SCRIPT.parents[1])
            for name, value in action.variables
        }
        command = dataclasses.replace(
            self._check(
                directory=action.directory,
                variables=variables,
                stdin=action.stdin,
                stdout=action.stdout,
                stderr=action.stderr,
                cold=action.cold,
            ),
            home=home,
        )
        if action.script:
            words = tuple(
                action.script if word == str(training.SCRIPT) else word for word in command.words
            )
            command = dataclasses.replace(command, words=words)
        self.injected = True
        self._watch(Started(command))

    # --- what is observed -----------------------------------------------------------------------

    def _watch(self, started: Started, *, limit: float | None = None, report: bool = True) -> None:
        if limit is None:
            limit = COLD_LIMIT if started.command.cold else LIMIT
        started.wait(limit - (time.monotonic() - started.began))
        self._judge(started, faulty=self.fault.faulty, report=report)
        self._orphans()

    def _orphans(self) -> None:
        left = bury(0 if any(kind is Problem.HANG for kind, _ in self.problems) else ORPHAN_SECONDS)
        if left and not any(kind is Problem.HANG for kind, _ in self.problems):
            self._problem(Problem.ORPHAN, "; ".join(left))

    def _judge(self, started: Started, *, faulty: bool, report: bool) -> None:
        self.codes.append(started.code)
        if started.ended is not None:
            self._seconds = started.ended - started.began
        said = text(started.command.output("stderr")).strip()[:400]
        self._said = " | ".join(filter(None, [self._said, said]))
        promise = self.fault.promise
        self.problems += of_command(started, promise, faulty=faulty, report=report)

    def _rerun(self) -> None:
        """A healthy check in the same directory, after whatever happened."""
        more = {} if (self.home / "cache").is_dir() else {"fresh": True}
        started = Started(self._check(faulty=False, name="rerun", **more))  # type: ignore[arg-type]
        started.wait(LIMIT)
        bury(ORPHAN_SECONDS)
        if started.code != 0:
            said = text(started.command.output("stderr"))
            self._problem(Problem.RERUN, f"exit code {started.code}: {said[-300:]}")

    def _problem(self, kind: Problem, details: str) -> None:
        self.problems.append((kind, details))

    # --- mounts ---------------------------------------------------------------------------------

    def _mount(self, path: Path, options: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
        self._mounted.append(path)

    def _unmount(self) -> None:
        while self._mounted:
            subprocess.run(["umount", "-l", str(self._mounted.pop())], check=False)


def own_mounts() -> bool:
    """Whether this process may mount; from then on its mounts are seen by it and its children."""
    try:
        os.unshare(os.CLONE_NEWNS)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _entry(cache: Path) -> Path:
    """The one reference in a cache."""
    return next(path.parent for path in sorted(cache.glob("*/meta.json")))


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path}\0".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()
