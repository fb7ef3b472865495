# SPDX-License-Identifier: Apache-2.0
"""Faults while a training is traced: it goes on bit for bit, or ends as the docs say."""

import contextlib
import os
import re
import shutil
import signal
import time
from enum import StrEnum
from pathlib import Path

from tests.assay.faults import baseline
from tests.assay.faults.actions import Harm, Where, fill, mount_small, spoil
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Outcome, Problem, action, of_training, text
from tests.assay.faults.processes import Started, Target, bury

_GAVE_UP = re.compile(r"(?im)^ttrace.*(unchecked|could not|not check|fail)")
TRACED = ("--ttrace", "--ttrace-no-wandb", "--ttrace-dir", "out", "--ttrace-iterations", "1-2")


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


_HARM = {Event.CUT: Harm.CUT, Event.OVERWRITTEN: Harm.OVERWRITTEN, Event.REMOVED: Harm.DELETED}


@action
def disturb(
    x: Experiment,
    event: Event,
    target: Target,
    moment: float,
    layout: str,
    kib: int = 0,
    cached: bool = False,
) -> None:
    """Something happens to a training after a share of its duration.

    Args:
        x: the experiment.
        event: what.
        target: to which process.
        moment: when.
        layout: of :data:`baseline.LAYOUTS`.
        kib: size of a file system.
        cached: whether the reference is in the cache when training begins.
    """
    if event in (Event.SMALL, Event.FILLED):
        if not x.mounts:
            return
        mount_small(x, Where.DIRECTORY, kib or 16 << 10)
    seconds = x.base.trained[layout][cached]
    patience = max(8.0, 2.5 * seconds)
    flags = (*TRACED, "--ttrace-timeout", f"{patience:.0f}")
    cache = x.cache("local") if cached else x.home / "cache"
    started = Started(baseline.training(x.base, x.home, layout, *flags, cache=cache))
    x.injected = _happen(x, started, event, target, moment, seconds)
    hung = not started.wait(2 * x.limit + 2 * patience)
    x.took(started)
    left = x.bury(hung=hung)
    if hung:
        x.problem(Problem.HANG, f"still running after {time.monotonic() - started.began:.0f} s")
    elif left:
        x.problem(Problem.ORPHAN, "; ".join(left))
    codes, logs = baseline.ended(x.home)
    x.codes += codes or [started.code]
    ranks = (Target.RANK0, Target.RANK1, Target.LAUNCHER)
    is_fatal = event is Event.KILL and target in ranks
    outcome = Outcome.EITHER if is_fatal or hung else Outcome.TRAINS
    x.output = text(x.home / "run.stderr.txt")[-300:]
    if x.injected or not is_fatal:
        x.problems += of_training(codes or [None], logs, x.base.bits[layout], outcome)


def _happen(
    x: Experiment, started: Started, event: Event, target: Target, moment: float, seconds: float
) -> bool:
    """Wait for the moment, and let it happen; returns whether it did."""
    out = x.home / "out"
    if event is Event.SMALL:
        return True
    if event in (Event.KILL, Event.STOP, Event.PAUSE):
        pid = x.target(started, target, moment, seconds)
        number = signal.SIGKILL if event is Event.KILL else signal.SIGSTOP
        if pid is None or not x.send(started, pid, number):
            return False
        if event is Event.PAUSE or (event is Event.STOP and target is Target.HELPER):
            # Nobody but its parent's parent can know of a helper, once it is the last one.
            started.wait(2.0 if event is Event.PAUSE else 2 * x.limit)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return True
    if not x.until(started, moment, seconds):
        return False
    if event is Event.FILLED:
        fill(out)
    elif event is Event.VANISHED:
        shutil.rmtree(out, ignore_errors=True)
    else:
        files: set[Path] = set()

        def there() -> bool:
            """Whether there is a reference by now."""
            folders = (x.home / "cache", out)
            paths = (path for folder in folders for path in folder.rglob("*.safetensors"))
            with contextlib.suppress(OSError):
                files.update(path.resolve() for path in paths)
            return bool(files)

        started.wait(x.limit, there)
        for file in files:
            with contextlib.suppress(OSError):
                spoil(file, _HARM[event], out)
        return bool(files) and started.code is None
    return True


@action
def fail(
    x: Experiment,
    function: str,
    call: int,
    rank: int,
    error: str = "RuntimeError",
    layout: str = "tp",
    outcome: Outcome = Outcome.TRAINS,
) -> None:
    """An exception in a function that a healthy run calls, on one rank.

    Args:
        x: the experiment.
        function: ``file:function``.
        call: which call of it (0: each of them).
        rank: of two.
        error: class of the exception, or a signal; "truncated": all mapped files.
        layout: of :data:`baseline.LAYOUTS`.
        outcome: what is promised.
    """
    mark = x.home / "raised.txt"
    failure = {"function": function, "call": call, "error": error, "mark": str(mark)}
    order = {str(rank): failure}
    x.output = f"{function} call {call}"
    cache = x.cache("local")
    command = baseline.training(x.base, x.home, layout, *TRACED, cache=cache, order=order)
    started = Started(command)
    hung = not started.wait(2 * x.limit)
    bury(0)
    codes, logs = baseline.ended(x.home)
    x.codes += codes or [started.code]
    x.injected = mark.is_file()
    if hung:
        x.problem(Problem.HANG, f"exit codes {codes}")
    elif x.injected:
        # Whichever rank reads a truncated file first says so.
        is_truncated = error == "truncated"
        named = None if is_truncated or outcome is Outcome.DIES else rank
        x.problems += of_training(codes, logs, x.base.bits[layout], outcome, rank=named)
        if is_truncated and not _GAVE_UP.search("".join(logs)):
            x.problem(Problem.NO_LINE, "".join(logs)[-300:])
