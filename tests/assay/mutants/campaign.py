# SPDX-License-Identifier: Apache-2.0
"""Run mutants: which lines does each layout run, and does the check find a fault in them?"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.matrix.configurations import Configuration
from megatron_ttrace.jobs.processes import ranks
from megatron_ttrace.jobs.processes.waiting import OutOfTimeError, Patience
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.saved.runner import NO_WANDB, Case, Runner
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Culprit, Result, Summary
from tests.assay.mutants import coverage, survivors, train
from tests.assay.mutants.layouts import in_order
from tests.assay.mutants.records import (
    Explanation,
    Fate,
    Mutant,
    MutantRow,
    MutantTrial,
)
from tests.assay.mutants.scan import modules

_PATIENCE = 6.0
_LEAST_SECONDS = 20.0
_MOST_SECONDS = 300.0
_CULPRITS = 5
_MORE = ("--eval-interval", "1000")
"""Megatron's own scripts need one."""
_STEPS = ("--train-iters", "3", "--log-interval", "1")
"""What one step leaves behind can change the next, and its log."""


def _last_line(error: TTraceError) -> str:
    """An error with, of the log lines that follow it, the last, which is the most important."""
    first, *rest = str(error).splitlines()
    return f"{first} {rest[-1].strip()}" if rest else first


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """What a layout runs without a mutant, and the seconds that its check takes."""

    coverage: coverage.Coverage
    seconds: float


class Campaign:
    """Runs jobs in one directory, which share references.

    Attributes:
        reached: by name, what each layout reaches.
        unhealthy: by name, why a layout was left out.
        alarmed: whether a layout was found diverged without a mutant.
    """

    def __init__(
        self,
        directory: Path,
        layouts: Sequence[Configuration],
        say: Callable[[str], None],
        scripts: Path | None = None,
    ) -> None:
        """Run every layout without a mutant. One that is not found equivalent is left out.

        Args:
            directory: where to work.
            layouts: to run mutants in.
            say: called with each line of progress.
            scripts: folder of the training scripts; by default our own.

        Raises:
            TTraceError: when ranks cannot be forked, or a script is missing.
        """
        self._directory = directory.resolve()
        self._say = say
        self._survivors = survivors.load()
        self._files = {module: str(path) for module, path in modules()}
        self.reached: dict[str, Reach] = {}
        self.unhealthy: dict[str, str] = {}
        self.alarmed = False
        self._healthy: dict[str, list[str]] = {}
        self._unfinished = False
        self._scripts = (scripts or launch_dir()).resolve()
        for script in {layout.script for layout in layouts}:
            if not (self._scripts / script).is_file():
                raise TTraceError(f"{self._scripts} has no {script}")
        say("importing Megatron")
        flags = ("--ttrace-device", "cpu", NO_WANDB)
        self._runner = Runner(
            self._directory, flags=flags, script=self._scripts / layouts[0].script
        )
        if not self._runner.forks:
            raise TTraceError("mutants run on a CPU only: hide the accelerator")
        for layout in layouts:
            self._reach(layout)

    def _reach(self, layout: Configuration) -> None:
        folder = self._directory / layout.name / "lines"
        began = time.monotonic()
        try:
            summary = self._run(layout, {train.COVERAGE: str(folder)}, _MOST_SECONDS)
            healthy = summary.verdict is Result.EQUIVALENT
            problem = "" if healthy else suites.culprits_of(summary)
            self.alarmed |= summary.verdict is Result.DIVERGED
        except TTraceError as error:
            problem = _last_line(error)
        if problem:
            self._say(f"{layout.name} fails without a mutant and is left out: {problem}")
            self.unhealthy[layout.name] = problem
            return
        found = coverage.read(folder.glob("rank-*.jsonl"))
        # Later runs of this layout do not make a reference.
        seconds = summary.timings["wall"] - summary.timings.get("reference", 0.0)
        spent = time.monotonic() - began
        self._say(f"{layout.name}: {len(found.lines)} lines of parallel code, {spent:.1f} s")
        self.reached[layout.name] = Reach(found, seconds)

    def layouts_of(self, mutant: Mutant) -> list[Configuration]:
        """The layouts that run a line of a mutant, best first."""
        wanted = {(self._files[mutant.module], line) for line in mutant.lines}
        names = {name for name, one in self.reached.items() if wanted & one.coverage.lines}
        return in_order(mutant.package, names)

    def run(self, plan: Sequence[tuple[Mutant, Sequence[Configuration]]]) -> Iterator[MutantRow]:
        """Try each mutant in its layouts until one kills it.

        A layout that trains, to the bit, as without the mutant needs no check: a mutant is inert if
        that is so in all its layouts. One that is inert, or listed as equivalent, is checked in the
        first layout only, to see that it survives. One that cannot be put in is left out, with a
        line that says so.
        """
        for mutant, layouts in plan:
            if not self._fits(mutant):
                continue
            trials: list[MutantTrial] = []
            explanation, why = survivors.explanation_of(mutant, self._survivors)
            tried = () if explanation is Explanation.EQUIVALENT else layouts
            for layout in tried:
                if self._is_idle(mutant, layout):
                    continue
                trial = self._try(mutant, layout)
                if trial.fate is not Fate.SURVIVED:
                    trials.append(trial)
                    break
                # What survives a check also trains to its end: if it did not, the machine failed.
                if not (self._unfinished and self._is_idle(mutant, layout)):
                    trials.append(trial)
            alone = trials or [self._try(mutant, layouts[0])]
            inert = bool(tried) and not trials and alone[-1].fate is Fate.SURVIVED
            yield MutantRow(mutant, tuple(alone), explanation, why, inert)

    def _fits(self, mutant: Mutant) -> bool:
        """Whether the mutant can be put in: its function here is the one in the file."""
        try:
            before = train.introduce(mutant)
        except TTraceError as error:
            self._say(f"{mutant.id} cannot be applied: {error}")
            return False
        for function, code in before:
            function.__code__ = code
        return True

    def _try(self, mutant: Mutant, layout: Configuration) -> MutantTrial:
        limit = max(_LEAST_SECONDS, _PATIENCE * self.reached[layout.name].seconds)
        began = time.monotonic()
        culprits: tuple[Culprit, ...] = ()
        try:
            summary = self._run(layout, {train.MUTANT: train.encode(mutant)}, limit)
            survived = summary.verdict is Result.EQUIVALENT
            fate = Fate.SURVIVED if survived else Fate.DIVERGED
            told, culprits = suites.culprits_of(summary), summary.culprits[:_CULPRITS]
        except OutOfTimeError as error:
            fate, told = Fate.HUNG, str(error)
        except TTraceError as error:
            fate, told = Fate.CRASHED, _last_line(error)
        ran = self.reached[layout.name].coverage.ran(
            self._files[mutant.module], mutant.span.first_line, mutant.classes
        )
        return MutantTrial(layout.name, fate, time.monotonic() - began, told, culprits, ran)

    def _is_idle(self, mutant: Mutant, layout: Configuration) -> bool:
        """Whether a job without a check trains, to the bit, as it does without the mutant."""
        if not self._healthy.get(layout.name):
            self._healthy[layout.name] = self._trained(layout, {})
        healthy = self._healthy[layout.name]
        found = self._trained(layout, {train.MUTANT: train.encode(mutant)})
        self._unfinished = not (healthy and found)
        return bool(healthy) and found == healthy

    def _trained(self, layout: Configuration, variables: dict[str, str]) -> list[str]:
        """What each rank has after some steps; nothing if the job fails."""
        folder = self._directory / layout.name / "trained"
        shutil.rmtree(folder, ignore_errors=True)
        case = self._case(layout, {**variables, train.STATE: str(folder)})
        limit = max(_LEAST_SECONDS, _PATIENCE * self.reached[layout.name].seconds)
        try:
            codes = ranks.run_ranks(
                case.nproc,
                (sys.executable, str(case.script), *case.arguments, *_STEPS),
                folder,
                fork=True,
                environment=dict(case.environment),
                patience=Patience(limit),
            )
        except OutOfTimeError:
            return []
        if any(codes):
            return []
        return [file.read_text(encoding="utf-8") for file in sorted(folder.glob("rank-*.txt"))]

    def _run(self, layout: Configuration, variables: dict[str, str], limit: float) -> Summary:
        case = dataclasses.replace(self._case(layout, variables), limit=limit)
        return self._runner.run(case).summary

    def _case(self, layout: Configuration, variables: dict[str, str]) -> Case:
        case = layout.case(self._directory)
        return dataclasses.replace(
            case,
            arguments=(*case.arguments, *_MORE),
            script=Path(train.__file__),
            environment={**variables, train.SCRIPT: str(self._scripts / layout.script)},
        )
