# SPDX-License-Identifier: Apache-2.0
"""Run each known bug twice: without the bug the job must be equivalent, with it diverged."""

import dataclasses
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.bugs import patching
from megatron_ttrace.evaluation.bugs.catalogue import Bug, BugLayout
from megatron_ttrace.evaluation.bugs.expect import Assessment, Looked, assess, looked
from megatron_ttrace.saved.runner import NO_WANDB, Case, Ended, Runner
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import ExitCode
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
    """One bug in one layout; of the healthy run the largest margin (1 would be a false alarm)."""

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
    """Run the bugs, in each layout that the variant's model can run.

    They share references and healthy runs.
    """
    say("importing Megatron")
    runner = Runner(directory, flags=(*_FLAGS, *variant.flags))
    pairs = _pairs(bugs, variant, runner.directory)
    cases = _in_order([*pairs.values()])
    say(f"checking {len(cases)} jobs")
    ended: dict[str, Ended] = {}
    for end in runner.run_all(cases):
        ended[end.case.name] = end
        if pair := pairs.get(end.case.name):
            row = _row(pair, ended[pair.healthy.name], end)
            say(f"{row.bug.id} {row.bug.name}, {row.layout.short}: {row.problem or 'as expected'}")
            yield row


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    """A bug in a layout: the job without it, which pairs may share, and with it."""

    bug: Bug
    layout: BugLayout
    healthy: Case
    faulty: Case


def _pairs(bugs: Sequence[Bug], variant: Variant, directory: Path) -> dict[str, _Pair]:
    """By the names of the jobs with a bug."""
    pairs: dict[str, _Pair] = {}
    healthy: dict[object, Case] = {}
    for bug in bugs:
        for number, layout in enumerate(bug.layouts):
            if variant.model not in layout.models:
                continue
            pair = _pair(bug, layout, f"{bug.id}-{number}", variant, directory)
            job = (pair.healthy.nproc, pair.healthy.arguments, pair.healthy.flags)
            shared = healthy.setdefault(job, pair.healthy)
            pairs[pair.faulty.name] = dataclasses.replace(pair, healthy=shared)
    return pairs


def _pair(bug: Bug, layout: BugLayout, name: str, variant: Variant, directory: Path) -> _Pair:
    data = suites.data_arguments(layout.data, directory, _WORDS)
    faulty = Case(
        name=f"{name}-faulty",
        arguments=(*variant.arguments, *data, *layout.arguments),
        nproc=layout.nproc,
        flags=(*layout.flags, "--ttrace-bug", bug.id),
    )
    healthy = dataclasses.replace(
        faulty,
        name=f"{name}-healthy",
        arguments=(*faulty.arguments, *layout.healthy),
        flags=layout.flags,
    )
    return _Pair(bug, layout, healthy, faulty)


def _in_order(pairs: Sequence[_Pair]) -> list[Case]:
    """All jobs, each without a bug some time before the one with it, which uses its reference."""
    cases: dict[str, Case] = {}
    for number, pair in enumerate(pairs):
        for ahead in pairs[number : number + 2]:
            cases.setdefault(ahead.healthy.name, ahead.healthy)
        cases[pair.faulty.name] = pair.faulty
    return [*cases.values()]


def _row(pair: _Pair, healthy: Ended, faulty: Ended) -> BugRow:
    good, bad = healthy.checked, faulty.checked
    return BugRow(
        bug=pair.bug,
        layout=pair.layout,
        seconds=healthy.seconds + faulty.seconds,
        healthy=good.summary if good else None,
        healthy_margin=max(map(suites.margin_of, good.verdicts()), default=0.0) if good else None,
        faulty=bad.summary if bad else None,
        assessment=assess(bad.summary, pair.bug.expected) if bad else None,
        error=healthy.reason or faulty.reason,
    )
