# SPDX-License-Identifier: Apache-2.0
"""Typed conclusions as the records of the contract, which have text in them."""

import dataclasses

from megatron_ttrace.report import explanations
from megatron_ttrace.report.ledger import citation_text
from megatron_ttrace.report.wording import notes_text
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.records import Culprit, TensorResult, Verdict

_MEASURED = [field.name for field in dataclasses.fields(TensorResult)]
_OF_CULPRITS = {field.name for field in dataclasses.fields(Culprit)} & {*_MEASURED} - {"name"}


def verdict_of(judged: Judged) -> Verdict:
    """A line of ``verdicts.jsonl``."""
    values = {name: getattr(judged, name) for name in _MEASURED}
    return Verdict(**values, note=notes_text(judged.notes), reason=judged.reason)


def culprit_of(diagnosis: Diagnosis) -> Culprit:
    """A culprit of ``summary.json``."""
    verdict, why = diagnosis.verdict, diagnosis.why
    return Culprit(
        **{name: getattr(verdict, name) for name in _OF_CULPRITS},
        name=diagnosis.name,
        direction=diagnosis.direction,
        reason=explanations.reason_text(diagnosis),
        explanation=explanations.explanation_text(why, verdict),
        hint=explanations.hint_text(why, verdict),
        where=str(why.places[0]) if why.places else "",
        collectives=citation_text(why.collectives),
        cause=why.finding.cause if why.finding else None,
        axes=why.finding.axes if why.finding else (),
        group=diagnosis.group,
        places=why.places,
    )
