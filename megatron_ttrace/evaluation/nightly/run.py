# SPDX-License-Identifier: Apache-2.0
"""Run a night: the commands for its parts, one after the other, each in its own process.

If a part crashes or its time runs out, the other parts still run, and its finished cases count.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ttrace.evaluation.nightly import records
from megatron_ttrace.evaluation.nightly.records import Gap, Night, NightCase, NightPart, State
from megatron_ttrace.evaluation.recipes.run import RESULTS
from megatron_ttrace.jobs import provenance
from megatron_ttrace.jobs.processes import child, logs
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import ExitCode
from megatron_ttrace.trace.sanitise import in_one_line

QUICK_BUGS = ("01", "11")
QUICK_MATRIX = ("dp2/gpt/fp32",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        bugs: ids; empty for all.
        bugs_flags: further arguments of ``ttrace eval bugs run``, e.g. ``--bf16``.
        matrix: name patterns; empty for all.
        recipes: a Megatron-LM checkout with training configurations, or ``None``.
        hunt: minutes for combinations of options, other ones every day.
    """

    parts: tuple[NightPart, ...] = tuple(NightPart)
    bugs: tuple[str, ...] = ()
    bugs_flags: tuple[str, ...] = ()
    matrix: tuple[str, ...] = ()
    recipes: Path | None = None
    hunt: float = 0.0
    seconds: float | None = None

    def described(self) -> dict[str, str]:
        """The choice of cases, to compare it between nights."""
        return {
            "parts": " ".join(self.parts),
            "bugs": " ".join(self.bugs) or "all",
            "bugs flags": " ".join(self.bugs_flags),
            "matrix": " ".join(self.matrix) or "all",
            "recipes": str(self.recipes or "none"),
            "hunt": f"{self.hunt:g} minutes",
        }


def run(options: Options, directory: Path, say: Callable[[str], None]) -> Night:
    """Run all parts; their logs and outputs stay in the directory."""
    began, clock = datetime.datetime.now().astimezone(), time.monotonic()
    owned.make(directory, ignored=True)
    cases: list[NightCase] = []
    gaps: list[Gap] = []
    for part in NightPart:
        if part not in options.parts:
            continue
        left = None if options.seconds is None else options.seconds - (time.monotonic() - clock)
        if left is not None and left <= 0:
            gaps.append(Gap(part, "no time was left for it"))
            continue
        say(f"{part}")
        log = directory / f"{part}.log"
        words, results = _command(part, options, directory, log)
        owned.expect(results)
        reason, is_whole = _execute(words, log, left)
        finished = _read(part, results)
        if is_whole and any(case.state is not State.GOOD for case in finished):
            reason = ""  # the cases say why
        cases += finished
        if reason or not finished:
            gaps.append(Gap(part, reason or "it ran nothing"))
        say(f"{part}: {len(finished)} cases{f', {reason}' if reason else ''}")
    return Night(
        began=began.isoformat(timespec="seconds"),
        seconds=time.monotonic() - clock,
        versions=_versions(),
        options=options.described(),
        cases=tuple(cases),
        gaps=tuple(gaps),
    )


def _command(
    part: NightPart, options: Options, directory: Path, log: Path
) -> tuple[tuple[str, ...], Path]:
    """The command of a part, and the file of its results."""
    work = ("--directory", str(directory / part))
    if part is NightPart.BUGS:
        results = directory / "bugs.jsonl"
        chosen = (*(options.bugs or ("--all",)), *options.bugs_flags, "--rows", str(results))
        return ("bugs", "run", *chosen, *work), results
    if part is NightPart.MATRIX:
        # Its results are its output.
        return ("matrix", *(options.matrix or ("--all",)), "--json", *work), log
    words: tuple[str, ...] = ("recipes", str(options.recipes))
    if part is NightPart.HUNT:
        seed = datetime.datetime.now().astimezone().date().toordinal()
        words = ("hunt", "--minutes", f"{options.hunt:g}", "--seed", str(seed))
    return (*words, *work), directory / part / RESULTS


def _execute(words: Sequence[str], log: Path, seconds: float | None) -> tuple[str, bool]:
    """Run one of our commands; returns why it did not succeed, or ``""``, and whether it finished.

    One that an error ended has left a record of it. It and its ranks end with this process, so that
    none survives a night that is stopped.
    """
    command = [sys.executable, "-W", "ignore", "-m", "megatron_ttrace", *words]
    process = child.start(command, dict(os.environ), log, group=0)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s, at the time limit of the night", False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code in (ExitCode.EQUIVALENT, ExitCode.DIVERGED):
        return "", True
    record = logs.record_of(log)
    reason = in_one_line(record.reason) if record else logs.how_it_ended(code)
    return f"{reason} (see {log})", code == ExitCode.COULD_NOT_CHECK and record is None


def _read(part: NightPart, output: Path) -> list[NightCase]:
    """The cases that a part finished; incomplete and foreign lines are skipped."""
    cases: list[NightCase] = []
    text = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                cases.append(_ROWS[part](json.loads(line)))
    return cases


_ROWS: dict[NightPart, Callable[[records.Json], NightCase]] = {
    NightPart.BUGS: records.known_bug,
    NightPart.MATRIX: records.configuration,
    NightPart.RECIPES: functools.partial(records.small_job, NightPart.RECIPES),
    NightPart.HUNT: functools.partial(records.small_job, NightPart.HUNT),
}


def _versions() -> dict[str, str]:
    """Everything that can change a number, including the checkout's commit."""
    versions = provenance.installed()
    versions["machine"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    if commit := provenance.ttrace().commit:
        versions["megatron-ttrace commit"] = commit[:12]
    return versions
