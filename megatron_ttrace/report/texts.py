# SPDX-License-Identifier: Apache-2.0
"""Typed conclusions as the records of the contract, which have text in them."""

from __future__ import annotations

from megatron_ttrace.report import explanations
from megatron_ttrace.report.ledger import citation_text
from megatron_ttrace.report.wording import notes_text
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.records import Culprit, Verdict


def verdict_of(one: Judged) -> Verdict:
    """A line of ``verdicts.jsonl``."""
    return Verdict(
        iteration=one.iteration,
        microbatch=one.microbatch,
        kind=one.kind,
        name=one.name,
        index=one.index,
        verdict=one.verdict,
        rel_err=one.rel_err,
        rel_err_eps=one.rel_err_eps,
        tolerance=one.tolerance,
        margin=one.margin,
        ranks=one.ranks,
        placement=one.placement,
        shape=one.shape,
        note=notes_text(one.notes),
        reason=one.reason,
    )


def culprit_of(diagnosis: Diagnosis) -> Culprit:
    """A culprit of ``summary.json``."""
    verdict, why = diagnosis.verdict, diagnosis.why
    return Culprit(
        name=diagnosis.name,
        kind=verdict.kind,
        direction=diagnosis.direction,
        reason=explanations.reason_text(diagnosis),
        explanation=explanations.explanation_text(why, verdict),
        iteration=verdict.iteration,
        microbatch=verdict.microbatch,
        index=verdict.index,
        verdict=verdict.verdict,
        ranks=verdict.ranks,
        rel_err=verdict.rel_err,
        rel_err_eps=verdict.rel_err_eps,
        tolerance=verdict.tolerance,
        margin=verdict.margin,
        hint=explanations.hint_text(why, verdict),
        where=why.where,
        collectives=citation_text(why.collectives),
        cause=why.finding.cause if why.finding else None,
        axes=why.finding.axes if why.finding else (),
        group=diagnosis.group,
    )
