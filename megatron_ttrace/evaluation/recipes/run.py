# SPDX-License-Identifier: Apache-2.0
"""Check the small jobs one after the other; what is finished stays finished."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.recipes.bridge import discover
from megatron_ttrace.evaluation.recipes.collect import Kind, Recipe, SmallJob
from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.jobs.job import Job
from megatron_ttrace.jobs.known_faults import finding_of
from megatron_ttrace.jobs.processes import ranks
from megatron_ttrace.jobs.processes.logs import record_of, usage_error
from megatron_ttrace.jobs.processes.waiting import Patience
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.jobs.shrink import documents
from megatron_ttrace.saved.runner import NO_WANDB, Case, Runner
from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Outcome, Result

RESULTS = "jobs.jsonl"
"""One line per finished job, below the working directory."""

_NUMBER = re.compile(r"\.\d+")
_VALIDATING = frozenset({"validate", "validate_args", "__post_init__", "finalize", "validate_yaml"})
"""Functions in which Megatron judges its arguments."""


class Answer(enum.StrEnum):
    """What came out of a job."""

    EQUIVALENT = "equivalent"
    DIVERGED = "diverged"
    REFUSED = "refused by Megatron"
    FAILS = "fails without ttrace too"
    HUB = "needs a model hub"
    COULD_NOT_CHECK = "cannot be checked"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """The result of a small job.

    Attributes:
        key: of the job.
        answer: what came out.
        ranks: of the job.
        tensors: how many were compared.
        unchecked: how many of them say nothing.
        seconds: of the whole check.
        why: culprits, or the reason that there is no answer.
        finding: the heading in docs/findings.md of a fault that the job combines what it takes for.
        command: that repeats the check.
        modules: the culprits' names without the numbers of layers.
    """

    key: str
    answer: Answer
    ranks: int
    tensors: int = 0
    unchecked: int = 0
    seconds: float = 0.0
    why: str = ""
    finding: str = ""
    command: str = ""
    modules: tuple[str, ...] = ()


def read_results(file: Path) -> dict[str, JobRow]:
    """The finished jobs of an earlier run, by key. A line that was cut off is ignored."""
    rows = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for line in lines:
        with contextlib.suppress(codec.CodecError):
            row = codec.decode(JobRow, codec.parse(line))
            rows[row.key] = row
    return rows


def jobs_of(recipes: Iterable[Recipe]) -> dict[str, SmallJob]:
    """The different jobs of all recipes, by key.

    The first of each folder come first, so that a run that is stopped has some of every kind.
    """
    folders: dict[str, dict[str, SmallJob]] = {}
    for recipe in recipes:
        folder = folders.setdefault(recipe.name.partition("/")[0], {})
        folder |= {job.key: job for job in recipe.jobs}
    rounds = itertools.zip_longest(*(folder.items() for folder in folders.values()))
    return dict(item for items in rounds for item in items if item)


def refused(folder: Path) -> bool:
    """Whether Megatron's own parser or validation ended the job, in the candidate."""
    for log in sorted((folder / "logs").glob("*.log")):
        record = record_of(log)
        frames = record.frames if record else ()
        if usage_error(log) or any(
            frame.function in _VALIDATING and frame.file.startswith("megatron/") for frame in frames
        ):
            return True
    return False


def run(
    jobs: Iterable[SmallJob],
    check: Callable[[SmallJob], JobRow],
    directory: Path,
    limit: int | None = None,
) -> Iterator[JobRow]:
    """Check what is not finished yet.

    Args:
        jobs: all jobs.
        check: checks one.
        directory: where results are kept.
        limit: how many to check at most.

    Yields:
        Each result, as soon as it is written.
    """
    owned.make(directory, ignored=True)
    file = directory / RESULTS
    finished = read_results(file)
    waiting = [job for job in jobs if job.key not in finished]
    for job in waiting[:limit]:
        row = check(job)
        with open(owned.append(file), "a", encoding="utf-8") as out:
            print(json.dumps(dataclasses.asdict(row)), file=out, flush=True)
        yield row


class Checker:
    """Checks small jobs of one checkout with the one Runner."""

    def __init__(
        self,
        directory: Path,
        script: Path,
        seconds: float,
        data: Callable[[Path], Callable[[SmallJob], Sequence[str]]],
        flags: Sequence[str] = (),
    ) -> None:
        """Import that checkout's Megatron.

        Args:
            directory: where to work.
            script: a training script of the checkout.
            seconds: after which a job is ended.
            data: writes data in a directory; what it returns says the arguments for it.
            flags: ``--ttrace-*`` flags of all jobs.
        """
        self._seconds = seconds
        self._runner = Runner(directory / "jobs", flags=(NO_WANDB, *flags), script=script)
        # Not before: this imports Megatron.
        self._data = data(directory / "data")

    def arguments(self, job: SmallJob) -> tuple[str, ...]:
        """A job's, with those of its data."""
        return (*job.arguments, *self._data(job))

    def __call__(self, job: SmallJob) -> JobRow:
        """Check a job."""
        case = Case(
            name=job.key,
            arguments=self.arguments(job),
            nproc=job.ranks,
            script=Path(job.script),
            environment=dict(job.environment),
            limit=self._seconds,
        )
        began = time.monotonic()
        started = self._runner.job(case)
        variables = [f"{name}={value}" for name, value in job.environment]
        assigned = disclosure.command(["env", *variables]) if variables else []
        row = JobRow(
            key=job.key,
            answer=Answer.COULD_NOT_CHECK,
            ranks=job.ranks,
            command=shlex.join([*assigned, *started.checking()]),
        )
        try:
            checked = self._runner.run(case)
            verdicts = checked.verdicts()
        except TTraceError as error:
            # Without the log's place, which is another one for every job.
            why = " / ".join(str(error).splitlines()).split(" (log: ")[0][:600]
            answer = row.answer
            if refused(started.directory):
                answer = Answer.REFUSED
            elif self._fails(started):
                answer = Answer.FAILS
            seconds = time.monotonic() - began
            return dataclasses.replace(row, answer=answer, seconds=seconds, why=why)
        summary = checked.summary
        finding = ""
        if summary.verdict is Result.DIVERGED:
            finding = finding_of(job.arguments, summary.versions["megatron-core"])
        return dataclasses.replace(
            row,
            answer=Answer[summary.verdict.name],
            tensors=len(verdicts),
            unchecked=sum(verdict.verdict is Outcome.UNCHECKED for verdict in verdicts),
            seconds=time.monotonic() - began,
            why=suites.culprits_of(summary, 3),
            finding=finding,
            modules=tuple(sorted({_NUMBER.sub("", each.name) for each in summary.culprits})),
        )

    def _fails(self, job: Job) -> bool:
        """Whether a job fails without a check, too.

        Only our own scripts run without one: another may go on after the steps that a check ends
        it after.
        """
        if job.script.parent != launch_dir():
            return False
        try:
            codes = ranks.run_ranks(
                job.nproc,
                (sys.executable, str(job.script), *job.arguments),
                job.directory / "alone",
                fork=self._runner.forks,
                environment=job.environment,
                patience=Patience(self._seconds),
            )
        except TTraceError:
            return False  # nothing is known of it
        return any(codes)


def text(place: Path) -> Callable[[SmallJob], Sequence[str]]:
    """Data for scripts of Megatron-LM, for :class:`Checker`."""
    prefix = documents.write(place / "text", (documents.SFT,))
    return lambda job: documents.arguments(job.script, prefix, job.arguments)


def of_bridge(place: Path) -> Callable[[SmallJob], Sequence[str]]:
    """Data for recipes of Megatron-Bridge; it is imported here, once for all ranks."""
    words = discover.write_data(place)
    discover.prepare()
    return lambda job: words


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeRow:
    """The result of a configuration: the worst of its jobs.

    Attributes:
        name: of the configuration.
        answer: ``None`` if it is not for training, or not all of its jobs have run.
        why: the reason.
        finding: as of a job.
        jobs: keys.
        lost: what the small jobs do not do.
    """

    name: str
    answer: Answer | None
    why: str
    finding: str = ""
    jobs: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


_WORST = (
    Answer.EQUIVALENT,
    Answer.REFUSED,
    Answer.FAILS,
    Answer.COULD_NOT_CHECK,
    Answer.DIVERGED,
)
_WITHOUT_JOBS = {
    Kind.NOT_SHRUNK: Answer.COULD_NOT_CHECK,
    Kind.HUB: Answer.HUB,
    Kind.REFUSED: Answer.REFUSED,
}


def coverage(recipes: Iterable[Recipe], finished: dict[str, JobRow]) -> list[RecipeRow]:
    """One row per configuration."""
    rows = []
    for recipe in recipes:
        keys = tuple(job.key for job in recipe.jobs)
        row = RecipeRow(recipe.name, None, recipe.why, jobs=keys, lost=recipe.lost)
        if recipe.kind in _WITHOUT_JOBS:
            row = dataclasses.replace(row, answer=_WITHOUT_JOBS[recipe.kind])
        elif recipe.kind is Kind.TRAINING and any(key not in finished for key in keys):
            row = dataclasses.replace(row, why="not run yet")
        elif recipe.kind is Kind.TRAINING:
            worst = max((finished[key] for key in keys), key=lambda job: _WORST.index(job.answer))
            row = dataclasses.replace(
                row, answer=worst.answer, why=worst.why, finding=worst.finding
            )
        rows.append(row)
    return rows
