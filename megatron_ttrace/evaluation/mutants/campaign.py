# SPDX-License-Identifier: Apache-2.0
"""Run mutants: which lines does each layout run, and is a fault in them found?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.evaluation.mutants import coverage, survivors, train
from megatron_ttrace.evaluation.mutants.layouts import LAYOUTS, Layout, in_order
from megatron_ttrace.evaluation.mutants.records import HARMLESS, Fate, Mutant, Row, Trial
from megatron_ttrace.evaluation.mutants.scan import modules
from megatron_ttrace.evaluation.mutants.swap import introduce
from megatron_ttrace.processes.waiting import OutOfTimeError
from megatron_ttrace.runtime.runner import NO_WANDB, Case, Runner
from megatron_ttrace.trace.records import Result, Summary

Say = Callable[[str], None]
Lines = set[tuple[str, int]]
_PATIENCE = 6.0
_LEAST_SECONDS = 20.0
_MOST_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """What a healthy run of one layout says: the lines it runs, and the seconds it takes."""

    layout: Layout
    lines: Lines
    seconds: float


class Campaign:
    """Runs jobs in one directory; ranks are forks of this process, references are shared."""

    def __init__(self, directory: Path, say: Say) -> None:
        self._directory = directory.resolve()
        self._say = say
        self._known = survivors.load()
        self.unhealthy: dict[str, str] = {}
        self.alarmed = False
        self._files = {module: str(path) for module, path in modules()}
        say("importing Megatron")
        self._runner = Runner(
            self._directory,
            flags=("--ttrace-device", "cpu", NO_WANDB),
        )
        if not self._runner.forks:
            raise TTraceError("mutants run on a CPU only: hide the accelerator")

    def reach(self, layouts: Sequence[Layout] = LAYOUTS) -> list[Reach]:
        """Run every layout healthy, recording lines.

        One that is not found equivalent can say nothing about mutants: it is left out, loudly, and
        kept in :attr:`unhealthy`; :attr:`alarmed` says whether one was found diverged.
        """
        found = []
        for layout in layouts:
            folder = self._directory / layout.name / "lines"
            began = time.monotonic()
            try:
                summary = self._run(layout, {train.COVERAGE: str(folder)}, _MOST_SECONDS)
                problem = "" if summary.verdict is Result.EQUIVALENT else _told(summary)
                self.alarmed = self.alarmed or summary.verdict is Result.DIVERGED
            except TTraceError as error:
                problem = _one_line(error)
            if problem:
                self._say(f"{layout.name} fails without a mutant and is left out: {problem}")
                self.unhealthy[layout.name] = problem
                continue
            lines = coverage.read(folder.glob("rank-*.jsonl"))
            # The run that made a reference says nothing about how long one without takes.
            seconds = summary.timings["wall"] - summary.timings.get("reference", 0.0)
            self._say(
                f"{layout.name}: {len(lines)} lines of parallel code, "
                f"{time.monotonic() - began:.1f} s"
            )
            found.append(Reach(layout, lines, seconds))
        return found

    def layouts_of(self, mutant: Mutant, reach: Sequence[Reach]) -> list[Layout]:
        """The layouts that run a line of a mutant, best first."""
        file = self._files[mutant.module]
        names = {
            one.layout.name
            for one in reach
            if any((file, line) in one.lines for line in mutant.lines)
        }
        return in_order(mutant.package, names)

    def _fits(self, mutant: Mutant) -> bool:
        """Whether the mutant can be put in: its function is in this process as in its file."""
        try:
            before = introduce(mutant)
        except TTraceError as error:
            self._say(f"{mutant.id} cannot be applied: {error}")
            return False
        for function, code in before:
            function.__code__ = code
        return True

    def run(
        self, plan: Sequence[tuple[Mutant, Sequence[Layout]]], reach: Sequence[Reach]
    ) -> Iterator[Row]:
        """Try each mutant in its layouts until one kills it.

        What is proven to be harmless is tried in the first only, to see that it still is. What
        cannot be applied is left out, loudly.
        """
        healthy = {one.layout.name: one.seconds for one in reach}
        for mutant, layouts in plan:
            if not self._fits(mutant):
                continue
            trials: list[Trial] = []
            explanation, why = survivors.explanation_of(mutant, self._known)
            harmless = explanation in HARMLESS
            for layout in layouts[:1] if harmless else layouts:
                trials.append(self._try(mutant, layout, healthy))
                if trials[-1].fate.killed:
                    break
            yield Row(mutant, tuple(trials), explanation, why)

    def _try(self, mutant: Mutant, layout: Layout, healthy: Mapping[str, float]) -> Trial:
        limit = max(_LEAST_SECONDS, _PATIENCE * healthy[layout.name])
        began = time.monotonic()
        try:
            summary = self._run(layout, {train.MUTANT: train.encode(mutant)}, limit)
        except OutOfTimeError as error:
            return Trial(layout.name, Fate.HUNG, time.monotonic() - began, str(error))
        except TTraceError as error:
            return Trial(layout.name, Fate.CRASHED, time.monotonic() - began, _one_line(error))
        fate = Fate.SURVIVED if summary.verdict is Result.EQUIVALENT else Fate.DIVERGED
        return Trial(layout.name, fate, time.monotonic() - began, _told(summary))

    def _run(self, layout: Layout, variables: dict[str, str], limit: float | None) -> Summary:
        case = Case(
            name=layout.name,
            script=Path(train.__file__),
            arguments=layout.arguments,
            nproc=layout.nproc,
            environment=variables,
            limit=limit,
        )
        return self._runner.run(case).summary


def _told(summary: Summary) -> str:
    """The first culprits."""
    return "; ".join(f"{c.name} {c.kind} ({c.verdict})" for c in summary.culprits[:2])


def _one_line(error: TTraceError) -> str:
    """An error with the last lines of a log; the last one is the most important."""
    first, *rest = str(error).splitlines()
    return f"{first} {rest[-1].strip()}" if rest else first
