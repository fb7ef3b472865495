# SPDX-License-Identifier: Apache-2.0
"""Check the small jobs one after the other; what is finished stays finished."""

from __future__ import annotations

import dataclasses
import enum
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_ttrace.evaluation.recipes.collect import Kind, Recipe, SmallJob
from megatron_ttrace.evaluation.recipes.known import finding_of
from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.jobs.processes.logs import record_of, usage_error
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Outcome, Result

RESULTS = "jobs.jsonl"
"""One line per finished job, below the working directory."""

_VALIDATING = frozenset({"validate_args", "__post_init__", "finalize", "validate_yaml"})
"""Functions in which Megatron judges its arguments."""


class Answer(enum.StrEnum):
    """What came out of a job."""

    EQUIVALENT = "equivalent"
    DIVERGED = "diverged"
    REFUSED = "refused by Megatron"
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

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self)


def read_results(file: Path) -> dict[str, JobRow]:
    """The finished jobs of an earlier run, by key. A line that was cut off is ignored."""
    found = {}
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for line in lines:
        try:
            values = json.loads(line)
            row = JobRow(**{**values, "answer": Answer(values["answer"])})
        except (ValueError, TypeError, KeyError):
            continue
        found[row.key] = row
    return found


def jobs_of(recipes: Iterable[Recipe]) -> dict[str, SmallJob]:
    """The different jobs of all recipes, by key."""
    return {job.key: job for recipe in recipes for job in recipe.jobs}


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
            print(json.dumps(row.to_json()), file=out, flush=True)
        yield row


class Checker:
    """Checks small jobs of one checkout with the one Runner."""

    def __init__(self, directory: Path, script: Path, seconds: float) -> None:
        """Import that checkout's Megatron.

        Args:
            directory: where to work.
            script: a training script of the checkout.
            seconds: after which a job is ended.
        """
        from megatron_ttrace.jobs.shrink import documents
        from megatron_ttrace.saved.runner import Runner

        self._seconds = seconds
        self._runner = Runner(directory / "jobs", script=script)
        self.prefix = documents.write(directory / "data" / "text", (documents.SFT,))

    def __call__(self, job: SmallJob) -> JobRow:
        """Check a job."""
        import shlex

        from megatron_ttrace.jobs.shrink import documents
        from megatron_ttrace.saved.runner import Case

        case = Case(
            name=job.key,
            arguments=(
                *job.arguments,
                *documents.arguments(job.script, self.prefix, job.arguments),
            ),
            nproc=job.ranks,
            script=Path(job.script),
            environment=dict(job.environment),
            limit=self._seconds,
        )
        began = time.monotonic()
        variables = [f"{name}={value}" for name, value in job.environment]
        checking = self._runner.job(case).checking()
        assigned = disclosure.command(["env", *variables]) if variables else []
        command = shlex.join([*assigned, *checking])
        try:
            found = self._runner.run(case)
            verdicts = found.verdicts()
        except TTraceError as error:
            by_megatron = refused(self._runner.job(case).directory)
            return JobRow(
                key=job.key,
                answer=Answer.REFUSED if by_megatron else Answer.COULD_NOT_CHECK,
                ranks=job.ranks,
                seconds=time.monotonic() - began,
                # Without the log's place, which is another one for every job.
                why=" / ".join(str(error).splitlines()).split(" (log: ")[0][:600],
                command=command,
            )
        summary = found.summary
        culprits = "; ".join(f"{c.name} {c.kind} ({c.verdict})" for c in summary.culprits[:3])
        answers = {
            Result.EQUIVALENT: Answer.EQUIVALENT,
            Result.DIVERGED: Answer.DIVERGED,
            Result.COULD_NOT_CHECK: Answer.COULD_NOT_CHECK,
        }
        diverged = summary.verdict is Result.DIVERGED
        return JobRow(
            key=job.key,
            answer=answers[summary.verdict],
            ranks=job.ranks,
            tensors=len(verdicts),
            unchecked=sum(verdict.verdict is Outcome.UNCHECKED for verdict in verdicts),
            seconds=time.monotonic() - began,
            why=culprits,
            finding=finding_of(job.arguments, summary.versions["megatron-core"])
            if diverged
            else "",
            command=command,
        )


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


_WORST = (Answer.EQUIVALENT, Answer.REFUSED, Answer.COULD_NOT_CHECK, Answer.DIVERGED)


def coverage(recipes: Iterable[Recipe], finished: dict[str, JobRow]) -> list[RecipeRow]:
    """One row per configuration."""
    rows = []
    for recipe in recipes:
        keys = tuple(job.key for job in recipe.jobs)
        if recipe.kind is not Kind.TRAINING:
            answer = Answer.COULD_NOT_CHECK if recipe.kind is Kind.NOT_SHRUNK else None
            rows.append(RecipeRow(recipe.name, answer, recipe.why))
        elif any(key not in finished for key in keys):
            rows.append(RecipeRow(recipe.name, None, "not run yet", jobs=keys, lost=recipe.lost))
        else:
            worst = max((finished[key] for key in keys), key=lambda row: _WORST.index(row.answer))
            rows.append(
                RecipeRow(
                    name=recipe.name,
                    answer=worst.answer,
                    why=worst.why,
                    finding=worst.finding,
                    jobs=keys,
                    lost=tuple(recipe.lost),
                )
            )
    return rows
