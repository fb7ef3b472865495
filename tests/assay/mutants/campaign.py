# SPDX-License-Identifier: Apache-2.0
"""Run mutants: which lines does each job run, and does the check find a fault in them?"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import shutil
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.cli import command
from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.bugs.expect import looked
from megatron_ttrace.evaluation.matrix.configurations import SCRIPTS, Configuration, arguments_of
from megatron_ttrace.jobs.processes import ranks
from megatron_ttrace.jobs.processes.waiting import OutOfTimeError, Patience
from megatron_ttrace.saved.runner import NO_WANDB, Case, Runner
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.records import Result, Summary
from tests.assay import harness
from tests.assay.harness import FALSE_ALARM, Row
from tests.assay.mutants import coverage, scan, truth
from tests.assay.mutants.records import Mutant

BARS = {"healthy": 1.0, "found": 0.95}
WANTED = {
    "right module": 0.9,
    "cause told": 0.6,
    "cause true": 0.95,
    "file first": 0.7,
    "function first": 0.5,
    "file in three": 0.85,
    "function in three": 0.65,
}
_PATIENCE, _LEAST_SECONDS, _MOST_SECONDS = 6.0, 20.0, 300.0
_CULPRITS = 5
_STEPS = ("--train-iters", "3", "--log-interval", "1")
"""What one step leaves behind can change the next, and its log."""
_TABLE = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text(encoding="utf-8"))
_EPILOG = """\
examples:
  python -m tests.assay mutants list --only '*wrong-group*'
  python -m tests.assay mutants run --count 20
  python -m tests.assay mutants run --all --continue --directory DIR

Places for faults are found by scanning Megatron's source. One fault at a time is put in, in memory,
in the ranks of a small job on the CPU, and the job is checked. The checker does not know of it
(docs/mutants.md).

exit code: 0 at least 95 % of those found that neither crash, hang nor are inert; 1 a job diverged
without a mutant, or with one that is listed as equivalent; 2 fewer, or a job could not run
"""


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``mutants`` command."""
    summary = "inject single faults into Megatron's parallel code and count how many are found"
    parser = command.add(subparsers, "mutants", _run, summary=summary, epilog=_EPILOG)
    actions = parser.add_subparsers(required=True, metavar="list|run")
    running = harness.add(
        *(actions, "run", _run),
        summary="run a sample of the mutants, or all",
        epilog=_EPILOG,
        count=100,
        seed="of the sample (default: today's date, UTC)",
        directory="ttrace-out/mutants",
    )
    running.add_argument("--all", action="store_true", help="all mutants whose line some job runs")
    running.add_argument(
        "--layout", nargs="+", action="extend", default=[], metavar="NAME", help="only these jobs"
    )
    harness.add(actions, "list", _list, summary="list the mutants", epilog=_EPILOG)


def layouts(names: Sequence[str]) -> list[Configuration]:
    """The jobs with names that match; all if no name is given."""
    jobs = []
    for name in harness.chosen(_TABLE["jobs"], names):
        nproc, model, *words = _TABLE["jobs"][name].split()
        text = " ".join(_TABLE["words"].get(word, word) for word in words)
        script = SCRIPTS.get(model, "pretrain_gpt.py")
        jobs.append(Configuration(name, int(nproc), arguments_of(model, text), script=script))
    return jobs


def in_order(package: str, jobs: Iterable[Configuration]) -> list[Configuration]:
    """The jobs, those for a package of Megatron first."""
    first = f"{_TABLE['first'].get(package, '')} {_TABLE['first']['then']}".split()
    order = [*first, *_TABLE["jobs"]]
    return sorted(jobs, key=lambda job: order.index(job.name))


@functools.cache
def survivors() -> dict[str, tuple[str, str]]:
    """By id, why mutants survive: the sort of explanation, and the explanation."""
    text = Path(__file__).with_name("survivors.toml").read_text(encoding="utf-8")
    return {
        id: (survivor["explanation"], " ".join(survivor["why"].split()))
        for survivor in tomllib.loads(text)["survivor"]
        for id in survivor["ids"]
    }


def _scanned(args: argparse.Namespace) -> list[Mutant]:
    mutants = scan.scan(args.only)
    if not mutants:
        raise TTraceError(f"nothing matches {' '.join(args.only)}: see the command 'list'")
    return mutants


def _list(args: argparse.Namespace) -> int:
    mutants = _scanned(args)
    for mutant in mutants:
        print(f"{mutant.id}  line {mutant.span.first_line}: {mutant}")
    print(f"{len(mutants)} mutants")
    return ExitCode.EQUIVALENT


def _run(args: argparse.Namespace) -> int:
    jobs, mutants = layouts(args.layout), _scanned(args)
    seed = args.seed
    if seed is None:  # a sample that is always the same would be learned by heart
        seed = int(f"{datetime.datetime.now(datetime.UTC):%Y%m%d}")
    say = command.progress()
    campaign = Campaign(args.directory, jobs)
    healthy = []
    for job in jobs:
        healthy.append(campaign.reach(job))
        say(str(healthy[-1]))
    reached = [mutant for mutant in mutants if campaign.layouts_of(mutant)]
    if not reached:
        raise TTraceError("no job runs the line of any of these mutants")
    cases = reached if args.all else scan.sample(reached, args.count, seed)
    about = f"{len(mutants)} mutants, {len(reached)} of them in code that a job runs"
    about += "; all of these" if args.all else f"; a sample of {len(cases)}, seed {seed}"
    say(about)
    rows = [*healthy, *harness.execute(cases, campaign.attempt, args)]
    return harness.finish(rows, BARS, wanted=WANTED, more=about)


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """What a job runs without a mutant, and the seconds that its check takes."""

    coverage: coverage.Coverage
    seconds: float


class Campaign:
    """Runs jobs in one directory, which share references."""

    def __init__(self, directory: Path, jobs: Sequence[Configuration]) -> None:
        """Import Megatron.

        Raises:
            TTraceError: when ranks cannot be forked.
        """
        self._directory = directory
        self._files = {module: str(path) for module, path in scan.modules()}
        self._jobs = {job.name: job for job in jobs}
        self._reached: dict[str, Reach] = {}
        self._healthy: dict[str, list[str]] = {}
        self._runner = Runner(self._directory, flags=("--ttrace-device", "cpu", NO_WANDB))
        if not self._runner.forks:
            raise TTraceError("mutants run on a CPU only: hide the accelerator")

    def reach(self, job: Configuration) -> Row:
        """Run a job without a mutant; one that is not equivalent is left out from then on."""
        folder = self._directory / job.name / "lines"
        marks = {"healthy": False}
        try:
            summary = self._check(job, {"lines": str(folder)}, _MOST_SECONDS)
        except TTraceError as error:
            return Row(job.name, "no mutant", marks, _last_line(error))
        if summary.verdict is not Result.EQUIVALENT:
            return Row(
                job.name, "no mutant", marks | {FALSE_ALARM: True}, suites.culprits_of(summary)
            )
        covered = coverage.read(folder.glob("rank-*.jsonl"))
        # Later runs of this job do not make a reference.
        seconds = summary.timings["wall"] - summary.timings.get("reference", 0.0)
        self._reached[job.name] = Reach(covered, seconds)
        note = f"{len(covered.lines)} lines of parallel code"
        return Row(job.name, "no mutant", {"healthy": True}, note, seconds)

    def layouts_of(self, mutant: Mutant) -> list[Configuration]:
        """The jobs that run a line of a mutant, best first."""
        lines = range(mutant.span.first_line, mutant.span.last_line + 1)
        wanted = {(self._files[mutant.module], line) for line in lines}
        names = [name for name, reach in self._reached.items() if wanted & reach.coverage.lines]
        return in_order(mutant.package, [self._jobs[name] for name in names])

    def attempt(self, mutant: Mutant) -> Row | None:
        """Try a mutant in its jobs until one kills it; ``None`` if it cannot be put in.

        A job that trains, to the bit, as without the mutant needs no check: a mutant is inert if
        that is so in all its jobs. One that is inert, or listed as equivalent, is checked in the
        first job only, to see that it survives.
        """
        with contextlib.suppress(TTraceError):
            for function, original in scan.introduce(mutant):
                function.__code__ = original
            return self._tried(mutant)
        return None

    def _tried(self, mutant: Mutant) -> Row:
        jobs = self.layouts_of(mutant)
        sort, why = survivors().get(mutant.id, ("", ""))
        tried = [] if sort == "equivalent" else jobs
        survived: Row | None = None
        for job in tried:
            idle, ended = self._is_idle(mutant, job)
            if idle:
                continue
            row = self._judged(mutant, job)
            if row.marks.get("found") is not False:
                return row
            # What survives a check also trains to its end: if it did not, the machine failed.
            if ended or not self._is_idle(mutant, job)[0]:
                survived = row
        if survived is not None:
            return dataclasses.replace(survived, note=why or "NOT EXPLAINED")
        row = self._judged(mutant, jobs[0])
        if row.marks.get("found") is False:
            return dataclasses.replace(row, marks={sort if not tried else "inert": True}, note=why)
        is_alarm = not tried and "found" in row.marks
        return dataclasses.replace(row, marks={**row.marks, FALSE_ALARM: True}) if is_alarm else row

    def _judged(self, mutant: Mutant, job: Configuration) -> Row:
        """A check of a job with a mutant, and whether its answer is right."""
        order = {"mutant": codec.encode(mutant)}
        details: dict[str, Any] = {**order, "job": job.name}
        row = Row(mutant.id, mutant.operator, {}, details=details)
        try:
            summary = self._check(job, order, self._limit(job))
        except OutOfTimeError as error:
            return dataclasses.replace(row, marks={"hung": True}, note=f"{job.name}: {error}")
        except TTraceError as error:
            note = f"{job.name}: {_last_line(error)}"
            return dataclasses.replace(row, marks={"crashed": True}, note=note)
        found = summary.verdict is Result.DIVERGED
        marks, note = {"found": found}, f"{job.name}: {suites.culprits_of(summary)}"
        if not found:
            return dataclasses.replace(row, marks=marks, note=note)
        ran = self._reached[job.name].coverage.ran(
            self._files[mutant.module], mutant.span.first_line, mutant.classes
        )
        culprits = summary.culprits[:_CULPRITS]
        marks["right module"] = truth.right_module(mutant, ran, culprits)
        cause = truth.right_cause(mutant, culprits)
        marks["cause told"] = cause is not None
        if cause is not None:
            marks["cause true"] = cause
        places = dataclasses.asdict(looked(culprits, [(mutant.module, mutant.qualname)]))
        marks |= {name.replace("_", " "): right for name, right in places.items()}
        details |= {"culprits": codec.encode(culprits), "ran": codec.encode(ran)}
        return dataclasses.replace(row, marks=marks, note=f"{note}; {culprits[0].explanation}")

    def _is_idle(self, mutant: Mutant, job: Configuration) -> tuple[bool, bool]:
        """Whether a job trains, to the bit, as without the mutant; whether both runs ended."""
        if not self._healthy.get(job.name):
            self._healthy[job.name] = self._trained(job, {})
        healthy = self._healthy[job.name]
        changed = self._trained(job, {"mutant": codec.encode(mutant)})
        ended = bool(healthy and changed)
        return ended and changed == healthy, ended

    def _trained(self, job: Configuration, order: dict[str, Any]) -> list[str]:
        """What each rank has after some steps without a check; nothing if the job fails."""
        folder = self._directory / job.name / "trained"
        shutil.rmtree(folder, ignore_errors=True)
        case = self._case(job, {**order, "end": str(folder)})
        try:
            observed = ranks.run_ranks(
                case.nproc,
                (sys.executable, str(case.script), *case.arguments, *_STEPS),
                folder,
                fork=True,
                environment=dict(case.environment),
                patience=Patience(self._limit(job)),
            )
        except OutOfTimeError:
            return []
        if any(observed.codes):
            return []
        return [file.read_text(encoding="utf-8") for file in sorted(folder.glob("[0-9]*.json"))]

    def _limit(self, job: Configuration) -> float:
        return max(_LEAST_SECONDS, _PATIENCE * self._reached[job.name].seconds)

    def _check(self, job: Configuration, order: dict[str, Any], limit: float) -> Summary:
        case = dataclasses.replace(self._case(job, order), limit=limit)
        return self._runner.run(case).summary

    def _case(self, job: Configuration, order: dict[str, Any]) -> Case:
        from tests.assay.planted import train

        return dataclasses.replace(
            job.case(self._directory),
            script=Path(train.__file__),
            environment={train.ORDER: json.dumps(order)},
        )


def _last_line(error: TTraceError) -> str:
    """An error with, of the log lines that follow it, the last, which is the most important."""
    first, *rest = str(error).splitlines()
    return f"{first} {rest[-1].strip()}" if rest else first
