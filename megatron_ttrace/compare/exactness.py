# SPDX-License-Identifier: Apache-2.0
"""Where a layout does not reorder arithmetic, the run must be bitwise equal to its reference.

Pipelines, data-parallel replicas and recomputation do not change the order of any sum. A difference
may still be rounding, so it is not a divergence. The rule depends on the configuration only;
docs/tolerance.md has it as a table.
"""

import dataclasses
import math
from collections.abc import Sequence

from megatron_ttrace.mcore.roles import is_shared_embedding
from megatron_ttrace.trace.codec import Record
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import STEP_LEVEL, Direction, Exactness, Kind, Outcome, TraceKey

_GRADIENTS = (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT)
_UPDATES = (Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic(Record):
    """The part of a configuration that decides in which order sums are taken.

    Attributes:
        splits_sums: axes larger than one that split sums or matrix products: tp, cp, ep, etp.
        shared_embedding: stages hold copies of one embedding and sum their gradients (tied
            embeddings, multi-token prediction).
        clips: gradients are scaled by a norm that is summed over all ranks.
        per_rank_state: something computed from a rank's own microbatches enters the next ones:
            FP8's amax history, the loads of experts.
        gradient_factor: candidate/reference ratio of activation gradients.
        deterministic: equal work gives equal bits: on a CPU, or with ``--deterministic-mode``.
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


_SUBNORMAL = 2.0**-126
"""Smaller errors are those of numbers that are too small to be halved exactly."""


def must_be_equal(key: TraceKey, job: Arithmetic, *, later: bool = False) -> bool:
    """Whether a tensor that a step computes must be bitwise equal to the reference's.

    ``later``: whether this step started from this run's own updates.
    """
    if not (job.deterministic and job.same_code):
        return False
    if job.pp == job.dp == 1 and not job.splits_sums:
        return True  # there is only one rank
    if job.splits_sums or job.per_rank_state:
        return False
    # The first and the last stage add up the gradients of their copies.
    adds_copies = job.pp > 1 and job.shared_embedding
    if later and (job.dp > 1 or job.clips or adds_copies):
        return False  # the step before need not be equal
    if key.microbatch != STEP_LEVEL and key.kind is not Kind.LOSS:
        # In each layer, one rank computes a microbatch as a whole. Powers of two scale exactly.
        return key.kind not in _GRADIENTS or math.frexp(job.gradient_factor)[0] == 0.5
    if job.dp > 1 or key.kind in (Kind.GRAD_NORM, Kind.METRIC):
        return False  # replicas, or the ranks' own parameters, are added up first
    if adds_copies and is_shared_embedding(key.name):
        return False
    # What is clipped was scaled by a norm that is summed in another order.
    return not (job.clips and (key.kind in _UPDATES or key.kind is Kind.PARAM))


def examine(
    verdicts: Sequence[Judged], job: Arithmetic | None
) -> tuple[list[Judged], Exactness | None]:
    """Add a note to every pass that should be bitwise equal and is not; count them.

    ``verdicts`` are in execution order. Without ``job`` (an older trace) nothing must be equal.
    """
    if job is None:
        return list(verdicts), None
    traced = {v.iteration for v in verdicts}
    expected = [
        v
        for v in verdicts
        if v.rel_err is not None
        and v.direction is not Direction.START
        and must_be_equal(v.key, job, later=v.iteration - 1 in traced)
    ]
    lost = [v for v in expected if (v.rel_err or 0.0) > _SUBNORMAL]
    found = Exactness(expected=len(expected), lost=len(lost))
    if lost:
        first = lost[0]
        found = dataclasses.replace(
            found, first=str(first.key), ranks=first.ranks, rel_err=first.rel_err
        )
    passed = {v.key for v in lost if v.verdict is Outcome.PASS}
    note = Note(Remark.NOT_BITWISE)
    return [
        dataclasses.replace(v, notes=(*v.notes, note)) if v.key in passed else v for v in verdicts
    ], found
