# SPDX-License-Identifier: Apache-2.0
"""Inject one fault into a real run, in a fresh directory, and say whether the promises held."""

import functools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.assay.faults.baseline import TRACED, Baseline, check, ended, training
from tests.assay.faults.fault import Fault, Outcome, Problem, of_command, of_training, text
from tests.assay.faults.processes import Command, Started, Target, bury
from tests.assay.harness import Row

_LIMIT = 60.0
_COLD_LIMIT = 150.0
"""Seconds after which a run counts as hanging; a cold start reads a thousand modules first."""
_ORPHAN_SECONDS = 5.0
ATTEMPTS = 3
"""How often a moment is tried that came after the end: the machine has become faster."""


class Experiment:
    """One fault in one directory.

    Attributes:
        fault: to be injected.
        base: runs without a fault.
        home: a directory for this fault.
        mounts: whether file systems can be mounted.
        injected: whether the fault happened; set by the action.
        problems: broken promises.
        codes: exit codes of what was judged.
        output: what was printed, for the row.
    """

    def __init__(self, fault: Fault, base: Baseline, home: Path, *, mounts: bool) -> None:
        self.fault = fault
        self.base = base
        self.home = home
        self.mounts = mounts
        self.injected = False
        self.problems: list[tuple[Problem, str]] = []
        self.codes: list[int | None] = []
        self.output = ""
        self._mounted: list[Path] = []
        self._expected: float | None = None
        self._took: float | None = None

    def run(self) -> Row:
        """Inject, observe, clean up."""
        try:
            for _ in range(ATTEMPTS):
                self._unmount()
                shutil.rmtree(self.home, ignore_errors=True)
                self.home.mkdir(parents=True)
                self.codes, self.output = [], ""
                self._expected = self._took = None
                self.fault.action(self)
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
        return self.row()

    def row(self) -> Row:
        """What became of the fault."""
        marks = {"injected": self.injected}
        if self.injected or self.problems:
            marks["as promised"] = not self.problems
        marks |= {str(problem): True for problem, _ in self.problems}
        problems = "; ".join(f"{problem}: {details!r}" for problem, details in self.problems)
        note = f"{self.fault}: exit codes {self.codes}; {problems or self.output}"
        return Row(self.fault.id, self.fault.family, marks, note, details={"codes": self.codes})

    def _too_late(self) -> bool:
        """Whether the run ended before its moment, and was faster than the healthy ones."""
        if self._expected is None or self._took is None or self._took >= self._expected:
            return False
        faster = self._took / self._expected
        self.base = self.base.scaled(faster)
        return True

    # --- for actions ----------------------------------------------------------------------------

    @property
    def limit(self) -> float:
        """Seconds after which a run counts as hanging, on a machine as busy as this one."""
        return _LIMIT * self.base.slowness

    def check(self, *flags: str, fresh: bool = False, **more: object) -> Command:
        """The check under test; without ``fresh`` it finds its reference in a cache of its own."""
        more.setdefault("faulty", self.fault.faulty)
        if not fresh and "cache" not in more:
            more["cache"] = self.cache()
        return check(self.home, *flags, **more)  # type: ignore[arg-type]

    def cache(self, name: str = "cache") -> Path:
        """A copy of the baseline's."""
        copy = self.home / "cache"
        shutil.copytree(self.base.folder / name, copy, dirs_exist_ok=True)
        return copy

    def begin(self, *flags: str, fresh: bool = False, layout: str = "", **more: object) -> Started:
        """Start what is disturbed: a check, or with a layout a training that is traced."""
        if not layout:
            return Started(self.check(*flags, fresh=fresh, **more))
        flags = (*TRACED, "--ttrace-timeout", f"{self._patience(fresh=fresh):.0f}")
        cache = self.home / "cache" if fresh else self.cache("local")
        return Started(training(self.base, self.home, layout, *flags, cache=cache))

    def _patience(self, *, fresh: bool) -> float:
        """Seconds that ranks of a training wait for each other."""
        return max(8.0, 2.5 * self.seconds_of(fresh=fresh))

    def seconds_of(self, *, fresh: bool, cold: bool = False) -> float:
        """The duration of a healthy check, or of a healthy training that is traced."""
        if self.fault.layout:
            return self.base.trained[self.fault.layout][not fresh]
        start = self.base.start if cold else 0.0
        return start + (self.base.fresh if fresh else self.base.cached)

    def until(self, started: Started, share: float, expected: float) -> bool:
        """Wait for a moment; returns whether the command still runs."""
        self._expected = expected
        return not started.wait(share * expected - (time.monotonic() - started.began))

    def target(self, started: Started, target: Target, share: float, expected: float) -> int | None:
        """Wait for a moment, and then for the process to be there."""
        if not self.until(started, share, expected):
            return None
        processes: list[int] = []

        def there() -> bool:
            pid = started.find(target)
            processes.extend([] if pid is None else [pid])
            return pid is not None

        started.wait(self.limit, there)
        return processes[0] if processes and started.code is None else None

    @staticmethod
    def send(started: Started, pid: int, number: signal.Signals, *, group: bool = False) -> bool:
        """Send a signal; returns whether it can have arrived."""
        if started.code is not None:
            return False
        try:
            (os.killpg if group else os.kill)(pid, number)
        except ProcessLookupError:
            return False
        return True

    def watch(
        self,
        started: Started,
        *,
        limit: float | None = None,
        report: bool = True,
        is_check: bool = True,
    ) -> None:
        """Wait for the end of a command, and judge it."""
        if self.fault.layout:
            self._watch_training(started)
            return
        if limit is None:
            limit = _COLD_LIMIT * self.base.slowness if started.command.cold else self.limit
        started.wait(limit - (time.monotonic() - started.began))
        self.judge(started, faulty=self.fault.faulty, report=report, is_check=is_check)
        self.orphans()

    def _watch_training(self, started: Started) -> None:
        hung = not started.wait(2 * self.limit + 2 * self._patience(fresh=True))
        self.took(started)
        if hung:
            seconds = time.monotonic() - started.began
            self.problems.append((Problem.HANG, f"still running after {seconds:.0f} s"))
        self.orphans()
        codes, logs = ended(self.home)
        self.codes += codes or [started.code]
        self.output = text(started.command.output("stderr"))[-300:]
        promised = self.fault.promise.outcome
        if self.injected or promised is Outcome.TRAINS:
            bits, outcome = self.base.bits[self.fault.layout], Outcome.EITHER if hung else promised
            self.problems += of_training(codes or [None], logs, bits, outcome)

    def orphans(self) -> None:
        """Nothing may be left of what was started."""
        hung = any(kind is Problem.HANG for kind, _ in self.problems)
        left = bury(0 if hung else _ORPHAN_SECONDS * self.base.slowness)
        if left and not hung:
            self.problems.append((Problem.ORPHAN, "; ".join(left)))

    def took(self, started: Started) -> None:
        """Remember how long a command took that has to be disturbed at a moment."""
        if started.ended is not None:
            self._took = started.ended - started.began

    def judge(self, started: Started, *, faulty: bool, report: bool, is_check: bool = True) -> None:
        """Compare a command's end with the promise."""
        self.codes.append(started.code)
        self.took(started)
        stderr = text(started.command.output("stderr")).strip()[:400]
        self.output = " | ".join(filter(None, [self.output, stderr]))
        self.problems += of_command(
            started, self.fault.promise, faulty=faulty, report=report, is_check=is_check
        )

    def mount(self, path: Path, options: str) -> None:
        """Put a small file system there."""
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
        self._mounted.append(path)

    def _unmount(self) -> None:
        while self._mounted:
            subprocess.run(["umount", "-l", str(self._mounted.pop())], check=False)

    def _rerun(self) -> None:
        """A healthy check in the same directory, after whatever happened."""
        has_cache = (self.home / "cache").is_dir()
        started = Started(self.check(faulty=False, name="rerun", fresh=not has_cache))
        started.wait(self.limit)
        bury(_ORPHAN_SECONDS * self.base.slowness)
        if started.code != 0:
            stderr = text(started.command.output("stderr"))
            self.problems.append((Problem.RERUN, f"exit code {started.code}: {stderr[-300:]}"))


@functools.cache
def own_mounts() -> bool:
    """Whether this process may mount; from then on its mounts are seen by it and its children."""
    try:
        os.unshare(os.CLONE_NEWNS)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True
