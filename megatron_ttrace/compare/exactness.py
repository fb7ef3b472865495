# SPDX-License-Identifier: Apache-2.0
"""Where a layout does not reorder arithmetic, the run must be bitwise its reference.

A pipeline, replicas of data-parallel ranks and recomputation move work about; they add up nothing
in another order. Equality to the last bit is then expected, and its loss is a finding far below any
tolerance: a stale buffer, a cast, another kernel. It is not a divergence (the error may still be
rounding), so it has a line of its own. The rule reads the configuration and nothing else;
docs/tolerance.md has it as a table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import Enum

from megatron_ttrace.mcore.roles import is_shared_embedding
from megatron_ttrace.trace.codec import Record
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    Direction,
    Exactness,
    Kind,
    Outcome,
    TraceKey,
    Verdict,
)

_GRADIENTS = (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT)
_UPDATES = (Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic(Record):
    """What of a configuration decides in which order things are added up.

    Attributes:
        splits_sums: axes larger than one that cut sums or matrix products: tp, cp, ep, etp.
        pp: pipeline stages.
        dp: data-parallel ranks.
        shared_embedding: stages hold copies of one embedding and sum their gradients (tied
            embeddings, multi-token prediction).
        clips: gradients are scaled by a norm that is summed over all ranks.
        per_rank_state: something computed from a rank's own microbatches enters the next ones:
            FP8's history of maxima, the loads of experts.
        gradient_factor: candidate/reference ratio of activation gradients.
        deterministic: the same work gives the same bits: a CPU, or ``--deterministic-mode``.
        same_code: the reference runs the same implementation.
    """

    splits_sums: tuple[str, ...] = ()
    pp: int = 1
    dp: int = 1
    shared_embedding: bool = False
    clips: bool = True
    per_rank_state: bool = False
    gradient_factor: float = 1.0
    deterministic: bool = True
    same_code: bool = True

    @property
    def is_single(self) -> bool:
        """Whether one rank does it all."""
        return self.pp == self.dp == 1 and not self.splits_sums


class Reordered(Enum):
    """Why a tensor need not be bitwise the reference's."""

    KERNELS = "an accelerator's kernels may add in any order (--deterministic-mode)"
    OTHER_CODE = "the reference runs other code (--ttrace-reference-args)"
    SPLIT_SUMS = "an axis splits its sums"
    RANK_STATE = "ranks keep state of their own microbatches"
    STEP_BEFORE = "the step before was not bitwise equal"
    GRADIENT_FACTOR = "gradients of another size are rounded differently"
    REPLICAS = "dp adds up microbatches in another order"
    NORM = "each rank sums its own parameters first"
    SHARED_EMBEDDING = "the first and the last stage add up their copies' gradients"
    CLIP = "clipped by a norm that is summed in another order"


def reordered(key: TraceKey, job: Arithmetic, *, later: bool = False) -> Reordered | None:
    """Why a tensor need not be bitwise the reference's; ``None`` when it must be.

    Args:
        key: of the tensor.
        job: the configuration.
        later: whether the step started from updates that this run made itself.
    """
    if not job.deterministic:
        return Reordered.KERNELS
    if not job.same_code:
        return Reordered.OTHER_CODE
    if key.kind is Kind.TOKENS or (key.kind is Kind.PARAM and key.index == 0 and not later):
        return None
    if job.is_single:
        return None
    if job.splits_sums:
        return Reordered.SPLIT_SUMS
    if job.per_rank_state:
        return Reordered.RANK_STATE
    if later and (job.dp > 1 or job.clips or (job.shared_embedding and job.pp > 1)):
        return Reordered.STEP_BEFORE
    if key.microbatch != STEP_LEVEL and key.kind is not Kind.LOSS:
        return _of_microbatch(key, job)
    return _of_step(key, job)


def _of_microbatch(key: TraceKey, job: Arithmetic) -> Reordered | None:
    """Activations and their gradients: each microbatch is computed whole, by one rank a layer."""
    if key.kind in _GRADIENTS and not _is_power_of_two(job.gradient_factor):
        return Reordered.GRADIENT_FACTOR
    return None


def _of_step(key: TraceKey, job: Arithmetic) -> Reordered | None:
    if job.dp > 1:
        return Reordered.REPLICAS
    if key.kind is Kind.GRAD_NORM:
        return Reordered.NORM
    if job.pp > 1 and job.shared_embedding and is_shared_embedding(key.name):
        return Reordered.SHARED_EMBEDDING
    if job.clips and (key.kind in _UPDATES or key.kind is Kind.PARAM):
        return Reordered.CLIP
    return None


def _is_power_of_two(factor: float) -> bool:
    return factor > 0 and math.frexp(factor)[0] == 0.5


def examine(
    verdicts: Sequence[Verdict], job: Arithmetic | None
) -> tuple[list[Verdict], Exactness | None]:
    """Note every pass that should be bitwise and is not; sum up.

    Args:
        verdicts: in execution order.
        job: the candidate's; without it (an older trace) nothing is expected.
    """
    from megatron_ttrace.report import wording  # only the rank that judges needs it

    if job is None:
        return list(verdicts), None
    traced = {verdict.iteration for verdict in verdicts}
    expected = lost = 0
    first: Verdict | None = None
    noted = []
    for verdict in verdicts:
        measured = verdict.rel_err is not None and verdict.direction is not Direction.START
        later = verdict.iteration - 1 in traced
        if measured and not reordered(verdict.key, job, later=later):
            expected += 1
            if verdict.rel_err != 0.0:
                lost += 1
                first = first or verdict
                if verdict.verdict is Outcome.PASS:
                    said = wording.note_text(Note(Remark.NOT_BITWISE))
                    note = "; ".join(filter(None, (verdict.note, said)))
                    verdict = dataclasses.replace(verdict, note=note)
        noted.append(verdict)
    return noted, Exactness(
        expected=expected,
        lost=lost,
        first=str(first.key) if first else "",
        ranks=first.ranks if first else (),
        rel_err=first.rel_err if first else None,
    )
