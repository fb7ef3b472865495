# SPDX-License-Identifier: Apache-2.0
"""Whether what was observed is what was promised."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from tests.faults.faults import Family, Promise, Stream
from tests.faults.processes import Command, Started

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINE = re.compile(r"^ttrace: .", re.MULTILINE)
_GAVE_UP = re.compile(r"(?im)^ttrace.*(unchecked|could not|not check|fail)")
_TRACEBACK = "Traceback (most recent call last)"


class Problem(StrEnum):
    """How a promise was broken."""

    WRONG_EQUIVALENT = "a faulty candidate passed"
    FALSE_ALARM = "a healthy candidate diverged"
    HARMED = "harmed"
    HANG = "hung"
    ORPHAN = "processes left behind"
    EXIT_CODE = "exit code"
    NO_LINE = "no line that says why"
    REASON = "the line does not say what happened"
    TRACEBACK = "traceback"
    CONTROL = "control characters"
    SUMMARY = "no report that agrees with the exit code"
    RERUN = "the next run in the same directory fails"


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one fault. ``problems``: name of the :class:`Problem`, and details."""

    id: str
    family: Family
    what: str
    injected: bool
    codes: tuple[int | None, ...]
    problems: tuple[tuple[Problem, str], ...]
    said: str
    seconds: float

    @property
    def kept(self) -> bool:
        """Whether all was as promised."""
        return self.injected and not self.problems


Problems = list[tuple[Problem, str]]


def of_command(started: Started, promise: Promise, *, faulty: bool, report: bool) -> Problems:
    """What a command did wrong.

    Args:
        started: the command, ended or given up.
        promise: what holds for it.
        faulty: whether its candidate has a bug.
        report: whether its report must agree with an exit code of 0 or 1.
    """
    code = started.code
    if code is None:
        seconds = time.monotonic() - started.began
        return [(Problem.HANG, f"still running after {seconds:.0f} s")]
    found: Problems = []
    command = started.command
    right = 1 if faulty else 0
    stdout, stderr = (text(command.output(stream)) for stream in ("stdout", "stderr"))
    if code == 1 - right:
        wrong = Problem.WRONG_EQUIVALENT if faulty else Problem.FALSE_ALARM
        found.append((wrong, f"exit code {code}: {stderr[-300:]}"))
    elif not (code in promise.codes or (promise.verdict and code == right)):
        found.append((Problem.EXIT_CODE, f"{code}, promised {_promised(promise, right)}"))
    if code in (0, 1) and report:
        problem = report_problem(command, code)
        if problem:
            found.append((Problem.SUMMARY, problem))
    if code == 2 and command.stderr is Stream.FILE:
        if len(_LINE.findall(stderr)) != 1:
            found.append((Problem.NO_LINE, stderr[-300:]))
        elif promise.reason and not re.search(promise.reason, stderr):
            found.append((Problem.REASON, stderr[-300:]))
    if _TRACEBACK in stdout + stderr:
        found.append((Problem.TRACEBACK, stderr[-300:]))
    strange = _CONTROL.search(stdout + stderr)
    if strange:
        found.append((Problem.CONTROL, repr(strange[0])))
    return found


def of_training(
    codes: Sequence[int | None],
    *,
    hung: bool,
    said: str,
    logged: Sequence[str],
    expected: Sequence[str],
) -> Problems:
    """What a training run did wrong in which tracing failed on one rank.

    Args:
        codes: of its ranks.
        hung: whether it had to be ended.
        said: all that its ranks printed.
        logged: losses and gradient norms, bit for bit.
        expected: the same of an untraced run.
    """
    found: Problems = []
    if hung:
        found.append((Problem.HANG, f"exit codes {list(codes)}"))
    ended = any(code != 0 for code in codes)
    if not set(logged) <= set(expected) or (not ended and len(logged) != len(expected)):
        found.append((Problem.HARMED, f"losses {logged}, not {expected}"))
    if not _GAVE_UP.search(said):
        found.append((Problem.NO_LINE, said[-300:]))
    if _TRACEBACK in said:
        found.append((Problem.TRACEBACK, said[said.index(_TRACEBACK) :][:600]))
    return found


def _promised(promise: Promise, right: int) -> list[int]:
    return sorted({*promise.codes, *([right] if promise.verdict else [])})


def report_problem(command: Command, code: int) -> str:
    """Why the report in a command's directory does not support its exit code."""
    from megatron_ttrace.trace import files
    from megatron_ttrace.trace.errors import TTraceError

    flag = "--output" if "--output" in command.words else "--ttrace-dir"
    directory = command.home / command.words[command.words.index(flag) + 1]
    try:
        summary, verdicts = files.load_report(directory)
    except (TTraceError, OSError) as error:
        return str(error)[:300]
    failed = any(verdict.verdict.is_failure for verdict in verdicts)
    if int(summary.verdict.exit_code) != code or failed != bool(code) or not verdicts:
        return f"the summary says {summary.verdict}, {len(verdicts)} verdicts, exit code {code}"
    return ""


def text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
