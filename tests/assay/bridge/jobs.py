# SPDX-License-Identifier: Apache-2.0
"""The jobs of ``jobs.toml``, and their checks."""

import dataclasses
import functools
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.records import Outcome
from tests import warm
from tests.assay.planted.mistakes import PLANTED
from tests.bridge import data
from tests.integration.jobs import ROOT, environment

SCRIPTS = ROOT / "tests" / "bridge"
FILE = Path(__file__).with_name("jobs.toml")
_SECONDS = 900.0


@dataclasses.dataclass(frozen=True)
class Job:
    """A row of the table.

    Attributes:
        name: of the row.
        words: of ``tests/bridge/job.py``.
        ranks: number of them.
        start: words of the job that saves the checkpoint this one begins with; empty without.
        refused: whether it must be refused.
        finding: number of the one (docs/findings.md) because of which it diverges; 0 without.
    """

    name: str
    words: tuple[str, ...]
    ranks: int
    start: tuple[str, ...]
    refused: bool
    finding: int

    @property
    def promised(self) -> str:
        """The verdict that is right."""
        return "refused" if self.refused else "diverged" if self.finding else "equivalent"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a check answered.

    Attributes:
        verdict: ``equivalent`` or ``diverged``; ``refused`` with one line, else the exit code.
        line: why it was refused.
        tensors: that were compared, and how many of them were not.
        margin: the worst.
        culprits: name and kind of tensor, the first first, with the cause.
        notices: of the report.
        seconds: it took.
    """

    verdict: str
    line: str = ""
    tensors: int = 0
    unchecked: int = 0
    margin: float = 0.0
    culprits: tuple[tuple[str, str, str], ...] = ()
    notices: tuple[str, ...] = ()
    seconds: float = 0.0


@functools.cache
def jobs() -> Mapping[str, Job]:
    """The table."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    words: dict[str, str] = table["words"]

    def spelled(text: str) -> tuple[str, ...]:
        return tuple(" ".join(words.get(word, word) for word in text.split()).split())

    return {
        name: Job(
            name,
            spelled(row["job"]),
            row.get("ranks", 2),
            spelled(row.get("from", "")),
            row.get("refused", False),
            row.get("finding", 0),
        )
        for name, row in table["jobs"].items()
    }


def check(directory: Path, job: Job, *, flags: Sequence[str] = (), planted: str = "") -> Answer:
    """``ttrace check`` of a job, in a directory that is emptied first.

    Args:
        directory: for its data, checkpoint and report.
        job: the job.
        flags: of ``ttrace check``.
        planted: a mistake of ``tests/assay/planted``.

    Raises:
        TTraceError: when the job that saves a checkpoint fails.
    """
    shutil.rmtree(directory, ignore_errors=True)
    data.write(directory / "data")
    words = [*job.words]
    if job.start:
        _save(directory, job)
        words.append(f"checkpoint.pretrained_checkpoint={directory / 'start'}")
    script = SCRIPTS / ("planted.py" if planted else "job.py")
    began = time.monotonic()
    ranks = ("--nproc-per-node", job.ranks)
    done = warm.run(
        [*("-m", "megatron_ttrace", "check", "--quiet", *ranks, *flags), "--", script, *words],
        cwd=directory,
        env=environment(**({PLANTED: planted} if planted else {}), **_caches(directory)),
        timeout=_SECONDS,
    )
    took = time.monotonic() - began
    return _answer(done, directory / "ttrace-out", round(took, 1))


def _answer(done: Any, report: Path, took: float) -> Answer:
    if done.returncode not in (0, 1):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        refused = done.returncode == 2 and len(lines) == 1
        verdict = "refused" if refused else f"exit code {done.returncode}"
        return Answer(verdict, " | ".join(lines[-3:]), seconds=took)
    summary, verdicts = load_report(report)
    counts = Counter(verdict.verdict for verdict in verdicts)
    return Answer(
        summary.verdict,
        tensors=counts.total(),
        unchecked=counts[Outcome.UNCHECKED],
        margin=max((verdict.margin or 0.0 for verdict in verdicts), default=0.0),
        culprits=tuple(
            (culprit.name, culprit.kind.value, str(culprit.cause or ""))
            for culprit in summary.culprits
        ),
        notices=tuple(summary.notices),
        seconds=took,
    )


def _save(directory: Path, job: Job) -> None:
    words = [*job.start, f"checkpoint.save={directory / 'start'}", "checkpoint.save_interval=2"]
    done = warm.run(
        ["-m", "tests.ranks", 2, SCRIPTS / "train.py", SCRIPTS / "job.py", *words],
        cwd=directory,
        env=environment(**_caches(directory)),
        timeout=_SECONDS,
    )
    if done.returncode:
        raise TTraceError(f"{job.name}: no checkpoint: {(done.stdout + done.stderr)[-2000:]}")


def _caches(directory: Path) -> dict[str, str]:
    """What ``datasets`` prepares stays below the directory."""
    return {"HF_HOME": str(directory / "hub"), "HF_HUB_OFFLINE": "1"}
