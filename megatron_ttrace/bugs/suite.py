# SPDX-License-Identifier: Apache-2.0
"""Run each known bug twice: the job without it must be equivalent, with it diverged."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.bugs.catalogue import Bug, Layout
from megatron_ttrace.bugs.expect import Findings, examine
from megatron_ttrace.bugs.uneven import uneven_corpus
from megatron_ttrace.errors import ExitCode, TTraceError
from megatron_ttrace.launching import job as jobs
from megatron_ttrace.records import Result, Summary
from megatron_ttrace.resources import launch_dir

_WORDS = 60
_COMMON = f"""
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-3
--lr-warmup-iters 0 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size {_WORDS}
--make-vocab-size-divisible-by 16
--attention-dropout 0 --hidden-dropout 0
"""
MODELS = {
    "gpt": f"{_COMMON} --transformer-impl local",
    "llama": f"{_COMMON} --transformer-impl transformer_engine --normalization RMSNorm --swiglu"
    " --group-query-attention --num-query-groups 2 --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --disable-bias-linear",
}
"""Small models; a layout's arguments come after these and win.

Mock data counts: with fewer words than a global batch has tokens, every rank's part of the
vocabulary occurs. The last word ends documents, so sequences differ in what ``--eod-mask-loss``
masks.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What all cases of a suite run have in common; ``flags`` are further ``--ttrace-*`` flags."""

    model: str = "gpt"
    bf16: bool = False
    seed: int | None = None
    flags: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """As Megatron's arguments."""
        return (
            *MODELS[self.model].split(),
            *(["--bf16"] if self.bf16 else []),
            *(["--seed", str(self.seed)] if self.seed is not None else []),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One bug in one layout. ``error`` says why it could not be run, if so."""

    bug: Bug
    layout: Layout
    healthy: Summary | None
    sick: Summary | None
    findings: Findings | None
    seconds: float
    error: str = ""

    @property
    def met(self) -> bool:
        """Whether both runs came out as they must."""
        return self.is_healthy and self.findings is not None and self.findings.met

    @property
    def is_healthy(self) -> bool:
        """Whether the run without the bug was found equivalent."""
        return self.healthy is not None and self.healthy.verdict is Result.EQUIVALENT

    @property
    def problem(self) -> str:
        """What is not as it must be; empty when all is."""
        if self.error:
            return self.error
        if self.healthy is not None and not self.is_healthy:
            named = ", ".join(f"{c.name} {c.kind}" for c in self.healthy.culprits[:2])
            return f"the healthy run is {self.healthy.verdict}: {named}"
        return self.findings.problem if self.findings else ""

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        findings = self.findings
        return {
            "id": self.bug.id,
            "name": self.bug.name,
            "nproc": self.layout.nproc,
            "arguments": list(self.layout.arguments),
            "healthy": self.is_healthy if self.healthy else None,
            "detected": findings.detected if findings else None,
            "localised": findings.localised if findings else None,
            "explained": findings.explained if findings else None,
            "margin": None if not findings or findings.margin is None else str(findings.margin),
            "culprits": [culprit.to_json() for culprit in self.sick.culprits] if self.sick else [],
            "met": self.met,
            "problem": self.problem,
            "seconds": round(self.seconds, 2),
        }


def run(
    bugs: Sequence[Bug],
    variant: Variant,
    directory: Path,
    say: Callable[[str], None],
) -> Iterator[Row]:
    """Run the cases one after the other; cases share references and healthy runs.

    Args:
        bugs: the cases.
        variant: model and precision.
        directory: where to work.
        say: told what happens, line by line.
    """
    say("importing Megatron")
    runner = _Runner(variant, directory, jobs.prepare("cpu"))
    for bug in bugs:
        for number, layout in enumerate(bug.layouts):
            if variant.model in layout.models:
                say(f"{bug.id} {bug.name}: {' '.join(layout.arguments)}")
                yield runner.row(bug, layout, f"{bug.id}-{number}")


def exit_code(rows: Sequence[Row]) -> ExitCode:
    """1 when an expectation failed, else 2 when a case could not be run."""
    if any(not row.met and not row.error for row in rows):
        return ExitCode.DIVERGED
    if any(row.error for row in rows):
        return ExitCode.COULD_NOT_CHECK
    return ExitCode.EQUIVALENT


class _Runner:
    def __init__(self, variant: Variant, directory: Path, fork: bool) -> None:
        self._variant = variant
        self._directory = directory
        self._fork = fork
        self._healthy: dict[object, Summary] = {}

    def row(self, bug: Bug, layout: Layout, name: str) -> Row:
        began = time.monotonic()
        healthy = sick = findings = None
        error = ""
        try:
            healthy = self._run_healthy(layout, name)
            sick = self._run(layout, layout.arguments, f"{name}-sick", ("--ttrace-bug", bug.id))
            findings = examine(sick, bug.expected)
        except TTraceError as reason:
            error = str(reason)
        return Row(bug, layout, healthy, sick, findings, time.monotonic() - began, error)

    def _run_healthy(self, layout: Layout, name: str) -> Summary:
        arguments = (*layout.arguments, *layout.healthy)
        question = (layout.nproc, arguments, layout.flags, layout.data)
        if question not in self._healthy:
            self._healthy[question] = self._run(layout, arguments, f"{name}-healthy", ())
        return self._healthy[question]

    def _run(
        self, layout: Layout, arguments: Sequence[str], name: str, flags: Sequence[str]
    ) -> Summary:
        job = jobs.Job(
            script=launch_dir() / "pretrain_gpt.py",
            arguments=(*self._variant.arguments, *self._data(layout), *arguments),
            nproc=layout.nproc,
            directory=self._directory / name,
            flags=(
                "--ttrace-device",
                "cpu",
                "--ttrace-no-wandb",
                *self._variant.flags,
                *layout.flags,
                *flags,
            ),
            environment={"TTRACE_CACHE": str((self._directory / "references").resolve())},
        )
        return jobs.run(job, fork=self._fork)

    def _data(self, layout: Layout) -> tuple[str, ...]:
        if layout.data == "mock":
            return ("--mock-data",)
        prefix = uneven_corpus((self._directory / "data" / layout.data).resolve(), _WORDS)
        return ("--data-path", str(prefix), "--split", "100,0,0")
