# SPDX-License-Identifier: Apache-2.0
"""From all ranks' findings to the answer; the same for a running job and for saved traces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megatron_ttrace import report
from megatron_ttrace.compare import by_design, collectives, counted, exactness, exercised, initial
from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.gathered import Holding, by_rank
from megatron_ttrace.compare.judge import judge
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.tolerance import Tolerances, epsilon
from megatron_ttrace.diagnose import start
from megatron_ttrace.diagnose.control import controlled
from megatron_ttrace.diagnose.culprits import localise
from megatron_ttrace.diagnose.explain import Explainer
from megatron_ttrace.diagnose.gather import Traces
from megatron_ttrace.diagnose.groups import looked_for_together
from megatron_ttrace.diagnose.places import Places
from megatron_ttrace.diagnose.ran import in_culprits
from megatron_ttrace.diagnose.residual import residuals
from megatron_ttrace.jobs import provenance
from megatron_ttrace.jobs.settings import DEFAULT_ALLOW_UNCHECKED, Settings
from megatron_ttrace.mcore import fronts, own_shards
from megatron_ttrace.mcore.roles import is_beyond, selects_keys
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.report import explanations, later, wandb, wording
from megatron_ttrace.trace.captured import Separate
from megatron_ttrace.trace.collectives import UNRECORDED, Ledger
from megatron_ttrace.trace.counted import Counted, decode
from megatron_ttrace.trace.executed import ChangedCode
from megatron_ttrace.trace.findings import Explanation, Remark
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.moments import Moments
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import (
    Direction,
    Kind,
    Outcome,
    Result,
    Summary,
    TraceKey,
    Verdict,
)
from megatron_ttrace.trace.store import TraceReader

_REASONS = 3
"""Reasons for unchecked tensors that are named."""


def conclude(
    reference: TraceReader,
    tolerances: Tolerances,
    holdings: Sequence[Holding],
    *,
    candidate: Path,
    mesh: Mesh,
    config: RunConfig,
    timings: dict[str, float],
    counts: Mapping[int, Sequence[Counted]] = MappingProxyType({}),
    notices: Sequence[str] = (),
    allow_unchecked: float = DEFAULT_ALLOW_UNCHECKED,
    ledger: Ledger = UNRECORDED,
    changed: ChangedCode | None = None,
    separate: Separate | None = None,
    review: Callable[[Sequence[Judged]], list[Judged]] = list,
    explains: bool = True,
) -> tuple[Summary, list[Verdict]]:
    """Judge, localise, explain, and put that into words.

    ``holdings`` are what all ranks found, ``counts`` what went into each rank's norms, counts and
    updates; ``candidate`` is the directory of its failed (or all) tensors, ``mesh`` that of any of
    its ranks. With a larger share of unchecked tensors than ``allow_unchecked``, and no culprit,
    the answer is "could not check". ``separate`` finds the losses' shares of gradients, by replays
    of the reference; ``review`` changes verdicts before culprits are sought among them;
    ``explains``: whether to look for causes, which are faults of spreading a model over ranks.
    """
    began = time.monotonic()
    eps = reference.reference.epsilon
    apart = {Kind.INITIAL}
    captured = (holding.measured.key for holding in holdings)
    # Where both runs can report and one does not, what it lacks is missing.
    can_log = reference.reference.logs and config.logs
    if unlogged := not can_log and _logs(reference) != _logs(captured):
        apart.add(Kind.METRIC)
    # On a GPU kernels draw the masks. A candidate that can be followed must drop what it should.
    if not (config.follows_dropout and any(key.kind is Kind.DROPOUT for key in reference)):
        apart.add(Kind.DROPOUT)
    keys = [key for key in reference if key.kind not in apart]
    starts = [reference.entry(key) for key in reference if key.kind is Kind.INITIAL]
    coverage = counted.judge(decode(reference.reference.counted), counts)
    computed = [holding for holding in holdings if holding.measured.key.kind not in apart]
    judged = judge(
        ((key, reference.entry(key).shape) for key in keys),
        computed,
        tolerances,
        eps,
        functools.partial(unjudged, mesh, config, reference.reference.in_blocks),
    )
    verdicts = [
        *initial.judge(
            {entry.key: (entry.shape, Moments.of(entry.sums)) for entry in starts},
            by_rank(holding for holding in holdings if holding.measured.key.kind is Kind.INITIAL),
            eps,
        ),
        *by_design.review(
            judged,
            computed,
            reference,
            tolerances,
            eps=eps,
            mesh=mesh,
            ledger=ledger,
            isolated=config.isolate,
        ),
        *coverage.verdicts,
    ]
    verdicts, exact = exactness.examine(review(verdicts), config.arithmetic)
    was_judged = time.monotonic()
    failed = {verdict.key for verdict in verdicts if verdict.verdict.is_failure}
    of_interest = (
        holding
        for holding in holdings
        if holding.measured.key in failed or start.is_start(holding.measured.key)
    )
    traces = Traces.read(reference, candidate, tolerances, by_rank(of_interest))
    steps = itertools.chain.from_iterable(counts.values())
    trained = {step.parts[number].name for step in steps for number in step.held}
    explainer = Explainer(traces, ledger, coverage.findings, trained)
    stages = start.stages_of(traces.started, traces.meshes)
    verdicts = start.without_consequences(start.claims(verdicts, stages))
    explain: Callable[[Judged], Explanation] = (
        explainer.explain if explains else lambda verdict: Explanation()
    )
    # With isolation nothing is computed from a wrong tensor.
    if explains and not config.isolate:
        explain = controlled(explainer.explain, verdicts, tolerances)
    diagnoses = localise(verdicts, explain, isolated=config.isolate)
    if separate is not None and explainer.unexplained:
        explainer.separate(separate)
        diagnoses = localise(verdicts, explain, isolated=config.isolate)
    functions = () if changed is None else changed.functions
    places = Places(ledger, verdicts, reference.reference.numbers, functions)
    culprits = tuple(
        explanations.culprit_of(diagnosis)
        for diagnosis in looked_for_together(map(places.of, diagnoses))
    )
    explained = time.monotonic()
    result = Result.DIVERGED if culprits else Result.EQUIVALENT
    sentences = [*notices]
    if alike := initial.alike(verdicts):
        sentences.append(wording.same_start_text(alike))
    sentences += map(wording.excused_text, _excused(verdicts))
    sentences += [wording.not_judged_text(statistic, why) for statistic, why in coverage.not_judged]
    if moved := tolerances.repeated:
        sentences.append(wording.repeated_text(moved[0], len(moved)))
    if unlogged:
        sentences.append("what is logged was not compared: one of the runs has no training_log")
    accumulates = _accumulates(config, reference) and _is_isolable(verdicts)
    if not culprits and not any(_is_evidence(verdict) for verdict in verdicts):
        result = Result.COULD_NOT_CHECK
        sentences.append("no computed tensor could be judged: all of them are unchecked")
    elif not culprits and (too_few := not_enough(verdicts, allow_unchecked, accumulates)):
        result = Result.COULD_NOT_CHECK
        sentences.append(too_few)
    observed = exercised.observe(reference, tolerances, config.requested)
    summary = Summary(
        verdict=result,
        counts=dict(Counter(verdict.verdict.value for verdict in verdicts)),
        culprits=culprits,
        config=config.on(mesh),
        versions=provenance.installed(),
        timings={
            **timings,
            "judge": was_judged - began,
            "localise and explain": explained - was_judged,
        },
        execution_order=tuple(dict.fromkeys(key.name for key in reference)),
        notices=tuple(sentences),
        exactness=exact,
        residuals=residuals(verdicts, culprits, explainer.evidence),
        not_exercised=exercised.unexercised(config.requested, observed, mesh, verdicts),
        collectives=collectives.rows(ledger.collectives),
        collective_findings=ledger.findings,
        changed_code=None if changed is None else in_culprits(changed, culprits),
        too_blind=result is Result.COULD_NOT_CHECK and accumulates and _are_blind(verdicts),
    )
    return summary, [explanations.verdict_of(verdict) for verdict in verdicts]


def not_enough(verdicts: Sequence[Judged], allowed: float, accumulates: bool = False) -> str:
    """The notice that too few tensors were checked; empty where enough were.

    The share is of the tensors that the step computes (:func:`exercised.share`). ``accumulates``:
    tensors may be blind because of rounding in modules before them.
    """
    unchecked, judged = exercised.share(verdicts)
    if not judged or unchecked / judged <= allowed:
        return ""
    most = _reasons(verdicts)
    isolate = accumulates and _are_blind(verdicts)
    return wording.too_few_text(unchecked, judged, allowed, most, isolate)


def _reasons(verdicts: Iterable[Judged]) -> list[tuple[Reason | None, int]]:
    """The most frequent reasons why tensors are unchecked."""
    reasons = Counter(
        verdict.reason
        for verdict in verdicts
        if verdict.verdict is Outcome.UNCHECKED and verdict.direction is not Direction.START
    )
    return reasons.most_common(_REASONS)


def _are_blind(verdicts: Iterable[Judged]) -> bool:
    return [reason for reason, _ in _reasons(verdicts)[:1]] == [Reason.BLIND]


def _excused(verdicts: Sequence[Judged]) -> Iterator[list[Judged]]:
    """The passes that rest on other tensors, or on ties, by the remark that says so."""
    for remark in (*by_design.EXCUSES, Remark.UNDECIDED, Remark.AT_THE_MEAN):
        found = [v for v in verdicts if any(note.what is remark for note in v.notes)]
        yield from [passes] if (passes := [v for v in found if v.verdict is Outcome.PASS]) else []


def _is_isolable(verdicts: Iterable[Judged]) -> bool:
    """Whether modules can be isolated: what is right only later, or elsewhere, would fail."""
    return not any(note.what in by_design.EXCUSES for v in verdicts for note in v.notes)


def _accumulates(config: RunConfig, reference: TraceReader) -> bool:
    """Whether rounding in 16 bits spreads from module to module."""
    meta = reference.reference
    return meta.epsilon > epsilon("float32") and not (config.isolate or meta.fp8)


def _logs(keys: Iterable[TraceKey]) -> bool:
    """Whether a run reported what it logs."""
    return any(key.kind is Kind.METRIC for key in keys)


def unjudged(
    mesh: Mesh,
    job: RunConfig,
    in_blocks: Container[str],
    key: TraceKey,
    holders: Sequence[Measured],
) -> Reason | None:
    """Why a tensor that these ranks hold is not a single device's by design, if it is not.

    ``in_blocks``: matrices that the reference steps as these ranks do.
    """
    if key.kind is Kind.ROUTING and key.index in job.own_tokens and not selects_keys(key):
        return Reason.OWN_TOKENS
    if (
        key.kind in job.own_shards
        and key.name not in in_blocks
        and key.direction is Direction.UPDATE
        and any(
            own_shards.is_matrix(key.name, holder.logical_shape) and holder.is_part
            for holder in holders
        )
    ):
        return Reason.OWN_SHARD
    return Reason.DISPATCHED if is_beyond(key, mesh, job.dispatcher) else None


def _is_evidence(verdict: Judged) -> bool:
    """Whether this pass says anything about the computation; start values and tokens are inputs."""
    return verdict.verdict is Outcome.PASS and verdict.direction is not Direction.START


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one rank concludes from the findings of all."""

    summary: Summary
    verdicts: list[Verdict]
    ledger: Ledger

    def settled(self, alone: Summary, timings: Mapping[str, float]) -> Answer:
        """This answer, and what a check with modules isolated found."""
        texts = wording.isolated_texts(alone.culprits)
        summary = dataclasses.replace(
            self.summary,
            notices=(*(f"isolated: {text}" for text in texts), *self.summary.notices),
            timings={**self.summary.timings, **timings},
        )
        return dataclasses.replace(self, summary=summary)


def prepare(settings: Settings) -> None:
    """Import and ask what an answer will need, in a process that waits anyway. Never raises."""
    with contextlib.suppress(Exception):  # it is raised when it is needed
        importlib.import_module("numpy.ma")  # for ``numpy.unique``
        provenance.megatron()
        provenance.ttrace()
    if settings.exit_after:
        report.prepare(wandb=settings.wandb and wandb.is_wanted(settings.wandb_online))


def publish(answer: Answer, settings: Settings) -> None:
    """Write the report; send it to the trackers that Megatron has opened.

    Where training goes on, only what is short is done at once: the verdict's files, and what goes
    into the job's own log and trackers. A process makes the rest.
    """
    tensorboard, writer = fronts.current().writers()
    # The loop's own run, or one that the script has opened.
    run = getattr(writer, "run", None) or wandb.active_run()
    report.publish(
        answer.summary,
        answer.verdicts,
        settings.directory,
        wandb_run=run,
        tensorboard=tensorboard,
        wandb=settings.wandb,
        wandb_online=settings.wandb_online,
        collectives=answer.ledger.collectives,
        pages=settings.exit_after,
    )
    if not settings.exit_after:
        later.start(
            settings.directory,
            html=run is None or not settings.wandb,
            wandb=run is None and settings.wandb and wandb.is_wanted(settings.wandb_online),
            online=settings.wandb_online,
        )
