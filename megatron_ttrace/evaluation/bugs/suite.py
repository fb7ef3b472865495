# SPDX-License-Identifier: Apache-2.0
"""Run each known bug twice: the job without it must be equivalent, with it diverged."""

from __future__ import annotations

import dataclasses
import string
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.errors import ExitCode, TTraceError
from megatron_ttrace.evaluation.bugs.catalogue import Bug, Layout
from megatron_ttrace.evaluation.bugs.expect import Findings, examine
from megatron_ttrace.evaluation.bugs.uneven import uneven_corpus
from megatron_ttrace.runtime.runner import NO_WANDB, Case, Checked, Runner
from megatron_ttrace.trace.records import Outcome, Result, Summary, Verdict

_FLAGS = ("--ttrace-device", "cpu", NO_WANDB)
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


SIZES = {
    "small": "",
    "medium": "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 64"
    " --max-position-embeddings 64",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What all cases of a suite run have in common; ``flags`` are further ``--ttrace-*`` flags."""

    model: str = "gpt"
    size: str = "small"
    bf16: bool = False
    seed: int | None = None
    flags: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """As Megatron's arguments."""
        return (
            *MODELS[self.model].split(),
            *SIZES[self.size].split(),
            *(["--bf16"] if self.bf16 else []),
            *(["--seed", str(self.seed)] if self.seed is not None else []),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One bug in one layout. ``error`` says why it could not be run, if so.

    ``healthy_margin`` is the worst of the healthy run: what is left to a false alarm.
    """

    bug: Bug
    layout: Layout
    healthy: Summary | None
    sick: Summary | None
    findings: Findings | None
    seconds: float
    error: str = ""
    healthy_margin: float | None = None

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
            "layout": self.layout.short,
            "arguments": list(self.layout.arguments),
            "healthy": self.is_healthy if self.healthy else None,
            "detected": findings.detected if findings else None,
            "localised": findings.localised if findings else None,
            "explained": findings.explained if findings else None,
            "margin": None if not findings or findings.margin is None else str(findings.margin),
            "healthy_margin": None if self.healthy_margin is None else str(self.healthy_margin),
            "culprits": [culprit.to_json() for culprit in self.sick.culprits] if self.sick else [],
            "met": self.met,
            "problem": self.problem,
            "seconds": round(self.seconds, 2),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """What a suite run comes to, by bug: the variants of one (04a, 04b) count together.

    Attributes:
        bugs: how many were run.
        detected, localised, explained: of how many every case was.
        twins: healthy runs found equivalent, of ``cases``.
        weakest: smallest margin of a culprit, and whose.
        nearest: largest margin of a healthy run, and whose.
    """

    bugs: int
    detected: int
    localised: int
    explained: int
    twins: int
    cases: int
    weakest: tuple[float, str] | None
    nearest: tuple[float, str] | None


def totals(rows: Sequence[Row]) -> Totals:
    """Count."""
    of_bug: dict[str, list[Row]] = {}
    for row in rows:
        of_bug.setdefault(row.bug.id.rstrip(string.ascii_lowercase), []).append(row)

    def whole(holds: Callable[[Findings], bool | None]) -> int:
        return sum(
            all(row.findings is not None and holds(row.findings) for row in own)
            for own in of_bug.values()
        )

    found = [
        (row.findings.margin, row.bug.id)
        for row in rows
        if row.findings is not None and row.findings.margin is not None
    ]
    healthy = [(r.healthy_margin, r.bug.id) for r in rows if r.healthy_margin is not None]
    return Totals(
        bugs=len(of_bug),
        detected=whole(lambda findings: findings.detected),
        localised=whole(lambda findings: findings.localised),
        explained=whole(lambda findings: findings.explained),
        twins=sum(row.is_healthy for row in rows),
        cases=len(rows),
        weakest=min(found, default=None),
        nearest=max(healthy, default=None),
    )


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
    pairs = _Pairs(variant, Runner(directory, flags=(*_FLAGS, *variant.flags)))
    for bug in bugs:
        for number, layout in enumerate(bug.layouts):
            if variant.model in layout.models:
                say(f"{bug.id} {bug.name}: {' '.join(layout.arguments)}")
                yield pairs.row(bug, layout, f"{bug.id}-{number}")


def exit_code(rows: Sequence[Row]) -> ExitCode:
    """1 when a run without a bug diverged, else 2 when a case is not as expected or not run."""
    if any(row.healthy is not None and row.healthy.verdict is Result.DIVERGED for row in rows):
        return ExitCode.DIVERGED
    return ExitCode.EQUIVALENT if all(row.met for row in rows) else ExitCode.COULD_NOT_CHECK


def worst_margin(verdicts: Iterable[Verdict]) -> float:
    """The largest margin of what was judged; that of a blind tensor says nothing, nor does luck."""
    judged = (v.margin for v in verdicts if v.verdict is not Outcome.UNCHECKED and not v.is_luck)
    return max((margin for margin in judged if margin is not None), default=0.0)


class _Pairs:
    """Runs each job with and without a bug; cases share the runs without."""

    def __init__(self, variant: Variant, runner: Runner) -> None:
        self._variant = variant
        self._runner = runner
        self._healthy: dict[object, tuple[Summary, float]] = {}

    def row(self, bug: Bug, layout: Layout, name: str) -> Row:
        began = time.monotonic()
        healthy = sick = findings = margin = None
        error = ""
        try:
            healthy, margin = self._run_healthy(layout, name)
            bugged = ("--ttrace-bug", bug.id)
            sick = self._run(layout, layout.arguments, f"{name}-sick", bugged).summary
            findings = examine(sick, bug.expected)
        except TTraceError as reason:
            error = str(reason)
        seconds = time.monotonic() - began
        return Row(bug, layout, healthy, sick, findings, seconds, error, margin)

    def _run_healthy(self, layout: Layout, name: str) -> tuple[Summary, float]:
        arguments = (*layout.arguments, *layout.healthy)
        question = (layout.nproc, arguments, layout.flags, layout.data)
        if question not in self._healthy:
            found = self._run(layout, arguments, f"{name}-healthy", ())
            self._healthy[question] = found.summary, worst_margin(found.verdicts())
        return self._healthy[question]

    def _run(
        self, layout: Layout, arguments: Sequence[str], name: str, flags: Sequence[str]
    ) -> Checked:
        return self._runner.run(
            Case(
                name=name,
                arguments=(*self._variant.arguments, *self._data(layout), *arguments),
                nproc=layout.nproc,
                flags=(*layout.flags, *flags),
            )
        )

    def _data(self, layout: Layout) -> tuple[str, ...]:
        if layout.data == "mock":
            return ("--mock-data",)
        prefix = uneven_corpus((self._runner.directory / "data" / layout.data).resolve(), _WORDS)
        return ("--data-path", str(prefix), "--split", "100,0,0")
