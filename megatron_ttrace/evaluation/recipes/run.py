# SPDX-License-Identifier: Apache-2.0
"""Check the small jobs; what is finished stays finished."""

import contextlib
import dataclasses
import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.recipes.collect import Answer, Recipe, SmallJob
from megatron_ttrace.jobs import fingerprint
from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.jobs.processes import ranks
from megatron_ttrace.jobs.processes.logs import died_of, record_of, usage_error
from megatron_ttrace.jobs.processes.waiting import OutOfTimeError, Patience
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.jobs.shrink import documents
from megatron_ttrace.saved.runner import NO_WANDB, Case, Runner
from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Outcome

RESULTS = "jobs.jsonl"
"""One line per finished job, below the working directory."""

_ALONE = "alone"
"""A job's logs without a check."""
_BUILDING = ("--fake-process-group", "--split", "0,1,0")
"""Nothing is sent to other ranks, and there is nothing to train on."""

_NUMBER = re.compile(r"\.\d+")
_VALIDATING = frozenset({"validate", "validate_args", "__post_init__", "finalize", "validate_yaml"})
"""Functions in which Megatron judges its arguments."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """The result of a small job.

    Attributes:
        unchecked: how many of them say nothing.
        why: culprits, or the reason that there is no answer.
        finding: the heading in docs/findings.md of a fault that jobs with its options show.
        modules: the culprits' names without the numbers of layers.
        code: what it is the result of (:meth:`Results.code`).
        together: values of a combination (``ttrace hunt``) that fail together, by dimension.
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
    code: str = ""
    together: tuple[tuple[str, str], ...] = ()


class Results:
    """The finished jobs below a directory. Of other code, or a repaired one, nothing is known."""

    def __init__(self, directory: Path, flags: Sequence[str] = ()) -> None:
        """Read what an earlier run left; a line that was cut off is ignored, and ended."""
        owned.make(directory, ignored=True)
        self._file, self._flags = directory / RESULTS, list(flags)
        self._codes: dict[str, str] = {}
        self._rows: dict[str, JobRow] = {}
        file = self._file
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if text and not text.endswith("\n"):
            self._write("")
        for line in text.splitlines():
            with contextlib.suppress(codec.CodecError):
                row = codec.decode(JobRow, codec.parse(line))
                self._rows[row.key] = row

    def code(self, script: str) -> str:
        """A digest of all that runs with a script, and of our flags; Megatron is imported."""
        if script not in self._codes:
            identity = {"code": fingerprint.code(Path(script)), "flags": self._flags}
            self._codes[script] = fingerprint.digest(identity)
        return self._codes[script]

    def of(self, job: SmallJob) -> JobRow | None:
        """A job's, if it has run with this code and there was an answer."""
        row = self._rows.get(job.key)
        if row is None or row.answer is Answer.COULD_NOT_CHECK:
            return None
        return row if row.code == self.code(job.script) else None

    def keep(self, job: SmallJob, row: JobRow) -> JobRow:
        """Write a job's result."""
        row = self._rows[job.key] = dataclasses.replace(row, code=self.code(job.script))
        self._write(json.dumps(dataclasses.asdict(row)))
        return row

    def _write(self, line: str) -> None:
        with open(owned.append(self._file), "a", encoding="utf-8") as out:
            out.write(f"{line}\n")


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
        """Import the Megatron of the script's checkout.

        ``data`` writes data to a directory, and returns what gives a job its arguments for them.
        A job is ended after so many ``seconds``.
        """
        self._seconds = seconds
        self.runner = Runner(directory / "jobs", flags=(NO_WANDB, *flags), script=script)
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
        started = self.runner.job(case)
        variables = [f"{name}={value}" for name, value in job.environment]
        assigned = disclosure.command(["env", *variables]) if variables else []
        row = JobRow(
            key=job.key,
            answer=Answer.COULD_NOT_CHECK,
            ranks=job.ranks,
            command=shlex.join([*assigned, *started.checking()]),
        )
        if self.fails(job, early=True):
            why = died_of(ranks.log_of(started.directory / _ALONE, 0))
            seconds = time.monotonic() - began
            return dataclasses.replace(row, answer=Answer.FAILS, seconds=seconds, why=why)
        try:
            checked = self.runner.run(case)
            verdicts = checked.verdicts()
        except TTraceError as error:
            # Without the log's place, which is another one for every job.
            why = " / ".join(str(error).splitlines()).split(" (log: ")[0][:600]
            answer = row.answer
            if refused(started.directory):
                answer = Answer.REFUSED
            elif not isinstance(error, OutOfTimeError) and self.fails(job):
                answer = Answer.FAILS
            seconds = time.monotonic() - began
            return dataclasses.replace(row, answer=answer, seconds=seconds, why=why)
        summary = checked.summary
        return dataclasses.replace(
            row,
            answer=Answer[summary.verdict.name],
            tensors=len(verdicts),
            unchecked=sum(verdict.verdict is Outcome.UNCHECKED for verdict in verdicts),
            seconds=time.monotonic() - began,
            why=suites.culprits_of(summary),
            finding=summary.known_fault,
            modules=tuple(sorted({_NUMBER.sub("", culprit.name) for culprit in summary.culprits})),
        )

    def fails(self, job: SmallJob, *, early: bool = False) -> bool:
        """Whether a job also fails without a check; false if that is not known.

        Only our own scripts run without one: another may go on after the steps that a check ends
        it after. ``early``: only if the first rank's model and optimizer cannot even be built,
        which takes a tenth of a second to find out.
        """
        if Path(job.script).parent != launch_dir():
            return False
        if early and not (self.runner.forks and self._ends_badly(job, 1, _BUILDING)):
            return False
        return self._ends_badly(job, job.ranks)

    def _ends_badly(self, job: SmallJob, started: int, more: Sequence[str] = ()) -> bool:
        try:
            observed = ranks.run_ranks(
                started,
                (sys.executable, job.script, *self.arguments(job), *more),
                self.runner.directory / job.key / _ALONE,
                fork=self.runner.forks,
                environment=dict(job.environment),
                patience=Patience(self._seconds),
                world=job.ranks,
            )
        except TTraceError:
            return False
        return any(observed.codes)


def text(place: Path) -> Callable[[SmallJob], Sequence[str]]:
    """Data for scripts of Megatron-LM, for :class:`Checker`."""
    prefix = documents.write(place / "text", (documents.SFT,))
    return lambda job: documents.arguments(job.script, prefix, job.arguments)


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeRow:
    """The result of a configuration: the worst of its jobs.

    Attributes:
        answer: ``None`` if it is not for training, or not all of its jobs have run and none of
            these is bad.
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
BAD = _WORST[_WORST.index(Answer.FAILS) :]
"""Answers of which one is enough for a configuration, whatever its other jobs give."""


def coverage(recipes: Iterable[Recipe], finished: Mapping[str, JobRow]) -> list[RecipeRow]:
    """One row per configuration."""
    rows = []
    for recipe in recipes:
        keys = tuple(job.key for job in recipe.jobs)
        row = RecipeRow(recipe.name, recipe.answer, recipe.why, jobs=keys, lost=recipe.lost)
        if recipe.is_trained:
            ran = [finished[key] for key in keys if key in finished]
            worst = max(ran, key=lambda job: _WORST.index(job.answer), default=None)
            if worst and (len(ran) == len(keys) or worst.answer in BAD):
                row = dataclasses.replace(
                    row, answer=worst.answer, why=worst.why, finding=worst.finding
                )
            else:
                row = dataclasses.replace(row, why="not run yet")
        rows.append(row)
    return rows
