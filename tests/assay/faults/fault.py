# SPDX-License-Identifier: Apache-2.0
"""A fault, what is promised all the same, what became of it, and the checks of a promise."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.assay.faults.processes import Command, Started, Stream
from tests.integration.jobs import bits_of
from tests.trace.test_owned import state_of

if TYPE_CHECKING:
    from tests.assay.faults.experiment import Experiment

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINE = re.compile(r"^ttrace: .", re.MULTILINE)
_ANY_LINE = re.compile(r"^(ttrace|usage)", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"


class Family(StrEnum):
    """Kinds of faults; one row of the table each."""

    SIGNALS = "signals to the launcher"
    RANKS = "killed or stopped ranks and references"
    DISK = "disks and directories"
    CACHE = "damaged traces"
    LOCAL = "exceptions on one rank"
    TWO = "two runs at once"
    HOSTILE = "hostile names and environments"
    TRAINING = "faults while a training is traced"
    INPUTS = "bad input"
    FOREIGN = "directories of somebody else"


class Problem(StrEnum):
    """How a promise was broken: columns of the table."""

    WRONG_EQUIVALENT = "a faulty candidate passed"
    FALSE_ALARM = "a healthy candidate diverged"
    HARMED = "harmed"
    FOREIGN = "somebody's file changed"
    HANG = "hung"
    MEMORY = "takes the machine's memory"
    ORPHAN = "processes left behind"
    EXIT_CODE = "exit code"
    NO_LINE = "no line that says why"
    REASON = "the line does not say what happened"
    TRACEBACK = "traceback"
    CONTROL = "control characters"
    SUMMARY = "no report that agrees with the exit code"
    RERUN = "the next run in the same directory fails"


class Outcome(StrEnum):
    """What becomes of a training in which a check fails."""

    TRAINS = "it goes on, bit for bit"
    ENDS = "the job ends, with exit code 2"
    EXITS = "every rank ends with exit code 2"
    DIES = "the job ends"
    EITHER = "it goes on, or the job ends"


@dataclasses.dataclass(frozen=True)
class Action:
    """What is done: a function of this room, and its arguments without the experiment."""

    name: str
    arguments: Mapping[str, Any]

    def __call__(self, experiment: Experiment) -> None:
        """Do it; what goes wrong is added to the experiment's problems."""
        _ACTIONS[self.name](experiment, **self.arguments)

    def __str__(self) -> str:
        words = (f"{name} {value!s:.300}" for name, value in self.arguments.items())
        return f"{self.name.replace('_', ' ')}: {', '.join(words)}"


_ACTIONS: dict[str, Callable[..., None]] = {}


def action(function: Callable[..., None]) -> Callable[..., Action]:
    """Let a call of this function, without its experiment, describe what is done in one."""
    signature = inspect.signature(function)
    _ACTIONS[function.__name__] = function

    @functools.wraps(function)
    def describe(*args: Any, **more: Any) -> Action:
        _, *arguments = signature.bind(None, *args, **more).arguments.items()
        return Action(function.__name__, dict(arguments))

    return describe


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    """What is promised: the right verdict, if ``verdict``, or one of ``codes``.

    ``reason`` is a pattern that the line of an exit code 2 must match, ``outcome`` what becomes of
    a training that is disturbed.
    """

    codes: tuple[int, ...] = (2,)
    verdict: bool = True
    reason: str = ""
    outcome: Outcome = Outcome.TRAINS


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        id: unique.
        family: its row of the table.
        action: what is done, where and when.
        promise: the expected outcome.
        faulty: whether the candidate has a known bug, so that exit code 0 is wrong; else 1 is.
        rerun: whether a healthy check follows in the same directory.
    """

    id: str
    family: Family
    action: Action
    promise: Promise = dataclasses.field(default_factory=Promise)
    faulty: bool = False
    rerun: bool = False

    @property
    def layout(self) -> str:
        """Of the training that is disturbed, if there is one."""
        default = "tp" if self.action.name == "fail" else ""
        return str(self.action.arguments.get("layout", default))

    def __str__(self) -> str:
        return f"{'faulty' if self.faulty else 'healthy'} candidate, {self.action!s:.400}"


Problems = list[tuple[Problem, str]]


def of_command(
    started: Started, promise: Promise, *, faulty: bool, report: bool, is_check: bool = True
) -> Problems:
    """What a command did wrong.

    Args:
        started: the command, ended or given up.
        promise: what holds for it.
        faulty: whether its candidate has a bug.
        report: whether its report must agree with an exit code of 0 or 1.
        is_check: whether 0 and 1 are verdicts, and exactly one line explains a 2.
    """
    code = started.code
    if code is None:
        seconds = time.monotonic() - started.began
        return [(Problem.HANG, f"still running after {seconds:.0f} s")]
    command = started.command
    stdout, stderr = (text(command.output(stream)) for stream in ("stdout", "stderr"))
    problems = printed(stdout + stderr)
    right = 1 if faulty else 0
    if is_check and code == 1 - right:
        wrong = Problem.WRONG_EQUIVALENT if faulty else Problem.FALSE_ALARM
        problems.append((wrong, f"exit code {code}: {stderr[-300:]}"))
    elif not (code in promise.codes or (promise.verdict and code == right)):
        promised = sorted({*promise.codes, *([right] if promise.verdict else [])})
        problems.append((Problem.EXIT_CODE, f"{code}, promised {promised}: {stderr[-300:]}"))
    if code in (0, 1) and report and (problem := report_problem(command, code)):
        problems.append((Problem.SUMMARY, problem))
    if code == 2 and command.stderr is Stream.FILE:
        lines = len((_LINE if is_check else _ANY_LINE).findall(stderr))
        if not lines or (is_check and lines > 1):
            problems.append((Problem.NO_LINE, stderr[-300:]))
        elif promise.reason and not re.search(promise.reason, stderr):
            problems.append((Problem.REASON, stderr[-300:]))
    return problems


def of_training(
    codes: Sequence[int | None],
    logs: Sequence[str],
    expected: Sequence[str],
    outcome: Outcome,
    *,
    rank: int | None = None,
) -> Problems:
    """What a training run did wrong while it was traced.

    Args:
        codes: of its ranks; ``None`` where it hung or was ended by its launcher.
        logs: what its ranks printed.
        expected: losses, gradient norms and weights of an untraced run, bit for bit.
        outcome: which is promised.
        rank: which one failed, if it has to be named.
    """
    output = "".join(logs)
    problems, logged = [], bits_of(output)
    if outcome in (Outcome.TRAINS, Outcome.EITHER):
        problems += printed(output, controls=False)
    is_whole = set(codes) == {0}
    if not set(logged) <= set(expected) or (is_whole and logged != list(expected)):
        problems.append((Problem.HARMED, f"losses {logged}, not {expected}"))
    wrong = {
        Outcome.TRAINS: not is_whole,
        Outcome.ENDS: None in codes or bool({0, 1} & set(codes)),
        Outcome.EXITS: set(codes) != {2},
        Outcome.DIES: bool({0, 1} & set(codes)),
        Outcome.EITHER: False,
    }[outcome]
    if wrong:
        kind = Problem.HARMED if outcome is Outcome.TRAINS else Problem.EXIT_CODE
        problems.append((kind, f"exit codes {list(codes)}, promised: {outcome}; {output[-600:]}"))
    elif rank is not None and (problem := _unnamed(logs, outcome, rank, is_whole)):
        problems.append((Problem.NO_LINE, problem))
    return problems


def _unnamed(logs: Sequence[str], outcome: Outcome, rank: int, is_whole: bool) -> str:
    """Why the ranks' lines do not say that this rank failed, and what follows from that."""
    if outcome is Outcome.EXITS:
        pattern = re.compile(rf"^ttrace(?: ends)?: rank {rank} on .*", re.MULTILINE)
        return "" if pattern.search(logs[0]) else logs[0]
    ending = "training goes on, UNCHECKED" if is_whole else "the job ends"
    pattern = re.compile(rf"^ttrace(?: ends)?: (.*); {ending}$", re.MULTILINE)
    lines = [set(pattern.findall(log)) for log in logs]
    if len(lines[rank]) != 1:
        return f"rank {rank} said {lines[rank]}"
    if is_whole and (lines[0] != lines[rank] or (rank and f"rank {rank} on " not in str(lines))):
        return f"ranks said {lines}"
    return ""


def printed(text: str, *, controls: bool = True) -> Problems:
    """Tracebacks, and control characters, in what was printed."""
    problems: Problems = []
    if _TRACEBACK in text or "internal error" in text:
        start = max(text.find(_TRACEBACK), 0)
        problems.append((Problem.TRACEBACK, text[start : start + 600]))
    if controls and (strange := _CONTROL.search(text)):
        problems.append((Problem.CONTROL, repr(strange[0])))
    return problems


def report_problem(command: Command, code: int) -> str:
    """Why the report in a command's directory does not support its exit code."""
    from megatron_ttrace.trace.errors import TTraceError
    from megatron_ttrace.trace.files import load_report

    flag = "--output" if "--output" in command.words else "--ttrace-dir"
    directory = command.home / command.words[command.words.index(flag) + 1]
    try:
        summary, verdicts = load_report(directory)
    except (TTraceError, OSError) as error:
        return str(error)[:300]
    failed = any(verdict.verdict.is_failure for verdict in verdicts)
    if int(summary.verdict.exit_code) != code or failed != bool(code) or not verdicts:
        return f"the summary says {summary.verdict}, {len(verdicts)} verdicts, exit code {code}"
    return ""


def changed(before: dict[str, str], folder: Path, *, new: bool = False) -> Problems:
    """Files that are not what they were; with ``new``, also those that did not exist."""
    after = state_of(folder)
    names = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    names = sorted(name for name in names if new or name in before)
    return [(Problem.FOREIGN, str(names[:5]))] if names else []


def text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
