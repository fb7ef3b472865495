# SPDX-License-Identifier: Apache-2.0
"""Run each known bug twice: without the bug the job must be equivalent, with it diverged."""

from __future__ import annotations

import dataclasses
import string
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.bugs import patching
from megatron_ttrace.evaluation.bugs.catalogue import Bug, BugLayout
from megatron_ttrace.evaluation.bugs.expect import Assessment, Looked, assess, looked
from megatron_ttrace.saved.runner import NO_WANDB, Case, Checked, Runner
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.records import Result, Summary

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
"""Small models; a layout's arguments come after these and override them.

Mock data counts up: with fewer words than a global batch has tokens, every rank's part of the
vocabulary occurs. The last word ends documents, so ``--eod-mask-loss`` masks different numbers of
tokens.
"""
SIZES = {
    "small": "",
    "medium": "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 64"
    " --max-position-embeddings 64",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What all jobs of a run have in common; ``flags`` are further ``--ttrace-*`` flags."""

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
class BugRow:
    """One bug in one layout.

    Attributes:
        healthy_margin: the largest of the healthy run; 1 would be a false alarm.
    """

    bug: Bug
    layout: BugLayout
    seconds: float
    healthy: Summary | None = None
    healthy_margin: float | None = None
    faulty: Summary | None = None
    assessment: Assessment | None = None
    error: str = ""

    @property
    def met(self) -> bool:
        """Whether both runs came out as expected."""
        return self.is_healthy and self.assessment is not None and self.assessment.met

    @property
    def is_healthy(self) -> bool:
        """Whether the run without the bug was found equivalent."""
        return self.healthy is not None and self.healthy.verdict is Result.EQUIVALENT

    @property
    def looked(self) -> Looked | None:
        """Whether what the report says to look at was changed.

        ``None`` without a report, or if the changed code is the stand-in of another library.
        """
        if self.faulty is None:
            return None
        changed = patching.changed_functions(self.bug.patches)
        is_own = any(module.startswith("megatron_ttrace.") for module, _ in changed)
        return None if is_own else looked(self.faulty.culprits, changed)

    @property
    def problem(self) -> str:
        """What is not as expected; empty if all is."""
        if self.error:
            return self.error
        if self.healthy is not None and not self.is_healthy:
            names = ", ".join(f"{c.name} {c.kind}" for c in self.healthy.culprits[:2])
            return f"the healthy run is {self.healthy.verdict}: {names}"
        return self.assessment.problem if self.assessment else ""

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        assessment = self.assessment
        margin = assessment.margin if assessment else None
        return {
            "id": self.bug.id,
            "name": self.bug.name,
            "nproc": self.layout.nproc,
            "layout": self.layout.short,
            "arguments": list(self.layout.arguments),
            "healthy": self.is_healthy if self.healthy else None,
            "detected": assessment.detected if assessment else None,
            "localised": assessment.localised if assessment else None,
            "explained": assessment.explained if assessment else None,
            "margin": None if margin is None else str(margin),
            "healthy_margin": None if self.healthy_margin is None else str(self.healthy_margin),
            "culprits": [c.to_json() for c in self.faulty.culprits] if self.faulty else [],
            "looked": codec.encode(self.looked),
            "met": self.met,
            "problem": self.problem,
            "seconds": round(self.seconds, 2),
        }


def totals(rows: Sequence[BugRow]) -> str:
    """A sentence: how many bugs were found in all layouts; 04a and 04b, say, are one bug."""
    assessed = [(row.bug.id.rstrip(string.ascii_lowercase), row.assessment) for row in rows]
    bugs = {bug for bug, _ in assessed}
    detected, localised, explained = (
        len(bugs - {bug for bug, assessment in assessed if not getattr(assessment, name, False)})
        for name in ("detected", "localised", "explained")
    )
    sentence = (
        f"of {len(bugs)} bugs {detected} detected, {localised} localised, {explained} explained; "
        f"{sum(row.is_healthy for row in rows)} of {len(rows)} healthy runs pass"
    )
    culprits = [(row.assessment.margin, row.bug.id) for row in rows if row.assessment]
    healthy = [(row.healthy_margin, row.bug.id) for row in rows]
    if weakest := min(((m, bug) for m, bug in culprits if m is not None), default=None):
        sentence += f"; weakest margin of a culprit {weakest[0]:.3g} ({weakest[1]})"
    if nearest := max(((m, bug) for m, bug in healthy if m is not None), default=None):
        sentence += f", largest of a healthy run {nearest[0]:.3g} ({nearest[1]})"
    return sentence


def exit_code(rows: Sequence[BugRow]) -> ExitCode:
    """1 if a run without a bug diverged, else 2 if a case is not as expected or was not run."""
    alarm = any(row.healthy is not None and row.healthy.verdict is Result.DIVERGED for row in rows)
    return suites.exit_code(alarm=alarm, met=all(row.met for row in rows))


def run(
    bugs: Sequence[Bug], variant: Variant, directory: Path, say: Callable[[str], None]
) -> Iterator[BugRow]:
    """Run the bugs one after the other, in each layout that the variant's model can run.

    They share references and healthy runs.
    """
    say("importing Megatron")
    suite = _Suite(variant, Runner(directory, flags=(*_FLAGS, *variant.flags)))
    for bug in bugs:
        for number, layout in enumerate(bug.layouts):
            if variant.model in layout.models:
                say(f"{bug.id} {bug.name}: {' '.join(layout.arguments)}")
                yield suite.row(bug, layout, f"{bug.id}-{number}")


class _Suite:
    """Runs each job with and without a bug; bugs share the runs without."""

    def __init__(self, variant: Variant, runner: Runner) -> None:
        self._variant = variant
        self._runner = runner
        self._healthy: dict[object, tuple[Summary, float]] = {}

    def row(self, bug: Bug, layout: BugLayout, name: str) -> BugRow:
        began = time.monotonic()
        row = BugRow(bug, layout, 0.0)
        try:
            healthy, margin = self._run_healthy(layout, name)
            row = dataclasses.replace(row, healthy=healthy, healthy_margin=margin)
            bugged = ("--ttrace-bug", bug.id)
            faulty = self._run(layout, layout.arguments, f"{name}-faulty", bugged).summary
            assessment = assess(faulty, bug.expected)
            row = dataclasses.replace(row, faulty=faulty, assessment=assessment)
        except TTraceError as reason:
            row = dataclasses.replace(row, error=str(reason))
        return dataclasses.replace(row, seconds=time.monotonic() - began)

    def _run_healthy(self, layout: BugLayout, name: str) -> tuple[Summary, float]:
        arguments = (*layout.arguments, *layout.healthy)
        job = (layout.nproc, arguments, layout.flags, layout.data)
        if job not in self._healthy:
            checked = self._run(layout, arguments, f"{name}-healthy")
            margin = max(map(suites.margin_of, checked.verdicts()), default=0.0)
            self._healthy[job] = checked.summary, margin
        return self._healthy[job]

    def _run(
        self, layout: BugLayout, arguments: Sequence[str], name: str, flags: Sequence[str] = ()
    ) -> Checked:
        data = suites.data_arguments(layout.data, self._runner.directory, _WORDS)
        return self._runner.run(
            Case(
                name=name,
                arguments=(*self._variant.arguments, *data, *arguments),
                nproc=layout.nproc,
                flags=(*layout.flags, *flags),
            )
        )
