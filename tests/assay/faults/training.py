# SPDX-License-Identifier: Apache-2.0
"""Faults while a training is traced: it goes on bit for bit, or ends as the docs say."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import time
from enum import StrEnum
from pathlib import Path

from tests.assay.faults import baseline
from tests.assay.faults.actions import Damage, Full, Harm, Where, fill
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Outcome, Problem, of_training, text
from tests.assay.faults.processes import Started, Target, bury

_GAVE_UP = re.compile(r"(?im)^ttrace.*(unchecked|could not|not check|fail)")
TRACED = ("--ttrace", "--ttrace-no-wandb", "--ttrace-dir", "out")


class Event(StrEnum):
    """What happens."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP, for good"
    PAUSE = "SIGSTOP, SIGCONT two seconds later"
    SMALL = "a file system that is too small"
    FILLED = "a file system that somebody fills"
    CUT = "the reference cut in half"
    OVERWRITTEN = "the reference overwritten"
    REMOVED = "the reference removed"
    VANISHED = "the directory removed"


@dataclasses.dataclass(frozen=True, slots=True)
class Disturbed:
    """Something happens to a training after a share of its duration.

    Attributes:
        event: what.
        target: to which process.
        moment: when.
        layout: of :data:`baseline.LAYOUTS`.
        kib: size of a file system.
        cached: whether the reference is in the cache when training begins.
    """

    event: Event
    target: Target
    moment: float
    layout: str
    kib: int = 0
    cached: bool = False

    def inject(self, experiment: Experiment) -> None:
        """Train, disturb, and compare what was logged."""
        x = experiment
        if self.event in (Event.SMALL, Event.FILLED):
            if not x.mounts:
                return
            Full(Where.DIRECTORY, self.kib or 16 << 10).mount(x)
        seconds = x.base.trained[self.layout][self.cached]
        patience = max(8.0, 2.5 * seconds)
        flags = [*TRACED, "--ttrace-iterations", "1-2", "--ttrace-timeout", f"{patience:.0f}"]
        cache = x.cache("local") if self.cached else x.home / "cache"
        started = Started(baseline.training(x.base, x.home, self.layout, *flags, cache=cache))
        x.injected = self.happen(x, started, seconds)
        hung = not started.wait(2 * x.limit + 2 * patience)
        x.took(started)
        left = x.bury(hung=hung)
        if hung:
            x.problem(Problem.HANG, f"still running after {time.monotonic() - started.began:.0f} s")
        elif left:
            x.problem(Problem.ORPHAN, "; ".join(left))
        codes, logs = baseline.ended(x.home)
        x.codes += codes or [started.code]
        is_fatal = self.event is Event.KILL and self.target in (
            *(Target.RANK0, Target.RANK1, Target.LAUNCHER),
        )
        outcome = Outcome.EITHER if is_fatal or hung else Outcome.TRAINS
        x.said = text(x.home / "run.stderr.txt")[-300:]
        if x.injected or not is_fatal:
            expected = x.base.bits[self.layout]
            x.problems += of_training(codes or [None], logs, expected, outcome)

    def happen(self, x: Experiment, started: Started, seconds: float) -> bool:
        """Wait for the moment, and let it happen; returns whether it did."""
        out = x.home / "out"
        match self.event:
            case Event.SMALL:
                return True
            case Event.KILL | Event.STOP | Event.PAUSE:
                pid = x.target(started, self.target, self.moment, seconds)
                kill = self.event is Event.KILL
                number = signal.SIGKILL if kill else signal.SIGSTOP
                if pid is None or not x.send(started, pid, number):
                    return False
                if self.event is Event.PAUSE:
                    started.wait(2.0)
                    resume(pid)
                elif self.event is Event.STOP and self.target is Target.HELPER:
                    # Nobody but its parent's parent can know of it, once it is the last one.
                    started.wait(2 * x.limit)
                    resume(pid)
                return True
        if not x.until(started, self.moment, seconds):
            return False
        folders = (x.home / "cache", out)
        if self.event is Event.FILLED:
            fill(out)
        elif self.event is Event.VANISHED:
            shutil.rmtree(out, ignore_errors=True)
        else:
            harm = {Event.CUT: Harm.CUT, Event.OVERWRITTEN: Harm.OVERWRITTEN}
            damage = Damage(harm.get(self.event, Harm.DELETED))
            files: set[Path] = set()

            def there() -> bool:
                """Whether there is a reference by now."""
                found = (path for folder in folders for path in folder.rglob("*.safetensors"))
                with contextlib.suppress(OSError):
                    files.update(path.resolve() for path in found)
                return bool(files)

            started.wait(x.limit, there)
            for file in files:
                with contextlib.suppress(OSError):
                    damage.spoil(file, x)
            return bool(files) and started.code is None
        return True


def resume(pid: int) -> None:
    """Let a stopped process go on, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """An exception in a function that a healthy run calls, on one rank.

    Attributes:
        function: ``file:function``, or a share of the list of functions that such a run calls.
        call: which call of it (0: each of them), or a share of the function's calls.
        rank: of two.
        error: class of the exception, or a signal; "truncated": all mapped files.
        layout: of :data:`baseline.LAYOUTS`.
        outcome: what is promised.
        checks: in a ``ttrace check`` instead of a training.
    """

    function: str | float
    call: float
    rank: int
    error: str = "RuntimeError"
    layout: str = "tp"
    outcome: Outcome = Outcome.EITHER
    checks: bool = False

    def inject(self, experiment: Experiment) -> None:
        """Train, or check, with it."""
        x, name, call = experiment, str(self.function), int(self.call)
        if isinstance(self.function, float):
            functions = x.base.functions[self.rank]
            name, count = functions[int(self.function * len(functions))]
            call = 1 + int(self.call * count)
        mark = x.home / "raised.txt"
        failure = {"function": name, "call": call, "error": self.error, "mark": str(mark)}
        order = {str(self.rank): {"raise": failure}}
        x.said = f"{name} call {call}"
        cache = x.cache("local")
        if self.checks:
            from tests.assay.planted import train

            variables = {train.ORDER: json.dumps(order)}
            script = Path(train.__file__)
            x.watch(Started(x.check(cache=cache, script=script, variables=variables)))
            x.injected = mark.is_file()
            return
        flags = (*TRACED, "--ttrace-iterations", "1-2")
        started = Started(
            baseline.training(x.base, x.home, self.layout, *flags, cache=cache, order=order)
        )
        hung = not started.wait(2 * x.limit)
        bury(0)
        codes, logs = baseline.ended(x.home)
        x.codes += codes or [started.code]
        x.injected = mark.is_file()
        if hung:
            x.problem(Problem.HANG, f"exit codes {codes}")
        elif x.injected:
            # Whichever rank reads a truncated file first says so.
            is_shared = self.outcome in (Outcome.DIES, Outcome.EITHER) or self.error == "truncated"
            rank = None if is_shared else self.rank
            expected = x.base.bits[self.layout]
            x.problems += of_training(codes, logs, expected, self.outcome, rank=rank)
            needs_line = self.outcome is Outcome.EITHER or self.error == "truncated"
            if needs_line and not _GAVE_UP.search("".join(logs)):
                x.problem(Problem.NO_LINE, "".join(logs)[-300:])
