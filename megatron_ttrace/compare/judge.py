# SPDX-License-Identifier: Apache-2.0
"""One verdict per logical tensor, from what all ranks measured."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron_ttrace.compare.gathered import Covered, Holding, coverage_of
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.sketch import squared_norm
from megatron_ttrace.compare.tolerance import (
    PartError,
    Tolerance,
    Tolerances,
    is_updated,
    margin_of,
)
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Outcome, TraceKey

type _Part = tuple[Holding, Sums]


def judge(
    expected: Iterable[tuple[TraceKey, tuple[int, ...]]],
    holdings: Iterable[Holding],
    tolerances: Tolerances,
    eps: float,
    unjudged: Callable[[TraceKey, Sequence[Measured]], Reason | None] = lambda key, holders: None,
) -> list[Judged]:
    """One verdict for every tensor of the reference or of any rank.

    ``expected`` are keys and logical shapes of the reference's traced iterations, in execution
    order. ``eps`` is the machine epsilon of the job's compute dtype, in whose multiples errors are
    printed. ``unjudged`` returns why a tensor that these ranks hold cannot be compared in this
    layout; ``None`` if it can.
    """
    by_key: dict[TraceKey, list[Holding]] = {}
    for holding in holdings:
        by_key.setdefault(holding.measured.key, []).append(holding)
    covered = functools.cache(coverage_of)  # most tensors of a model share a layout
    verdicts = []
    for key, shape in expected:
        of_key, alike = by_key.pop(key, []), _must_agree(key, tolerances)
        if reason := unjudged(key, [holding.measured for holding in of_key]):
            # What a rank has depends on the layout; its copies agree in any.
            if conflicts := _conflicts(of_key) if alike else ():
                note = Note(Remark.REPLICAS, ranks=conflicts)
                verdict = verdict_of(key, shape, Outcome.REPLICA_CONFLICT, conflicts, note)
            else:
                note = Note(reason)
                verdict = verdict_of(key, shape, Outcome.UNCHECKED, [], note, reason=reason)
            verdicts.append(verdict)
        else:
            limit = tolerances.of(key)
            verdicts.append(
                _judge(key, shape, of_key, limit, alike=alike, eps=eps, covered=covered)
            )
    for key, of_key in by_key.items():
        shape = of_key[0].measured.logical_shape
        verdicts.append(verdict_of(key, shape, Outcome.EXTRA, _ranks(of_key), Note(Remark.EXTRA)))
    return verdicts


def _judge(
    key: TraceKey,
    shape: tuple[int, ...],
    holdings: Sequence[Holding],
    tolerance: Tolerance,
    *,
    alike: bool,
    eps: float,
    covered: Covered,
) -> Judged:
    """``alike``: ranks that hold the same elements must have the same bits."""
    verdict = functools.partial(verdict_of, key, shape)
    if not holdings and 0 in shape:
        # An expert that no token of a microbatch chose: no rank needs to have it.
        return verdict(Outcome.PASS, [], Note(Remark.EMPTY))
    if not holdings:
        return verdict(Outcome.MISSING, [], Note(Remark.MISSING))
    parts: list[_Part] = []
    misfits = []
    for holding in holdings:
        if holding.measured.problem or holding.measured.sums is None:
            misfits.append(holding)
        else:
            parts.append((holding, holding.measured.sums))
    if misfits:
        note = min(misfits, key=lambda holding: holding.ranks).measured.note
        return verdict(Outcome.SHAPE, _ranks(misfits), note)
    ranks = _ranks(holdings)
    placement = min(holdings, key=lambda holding: holding.ranks).measured.placement
    if bad := [holding for holding, sums in parts if sums.nonfinite]:
        note = Note(Remark.NONFINITE)
        return verdict(Outcome.NONFINITE, _ranks(bad), note, placement=placement)
    cover = covered(
        shape, tuple(holding.measured.boxes for holding in holdings for _ in range(holding.copies))
    )
    if not cover.complete:
        return verdict(Outcome.UNCOVERED, ranks, Note(Remark.UNCOVERED), placement=placement)
    errors: dict[int, PartError] = {}
    for holding, sums in _wholes(parts):
        error = tolerance.error_of(sums)
        for rank in holding.ranks:
            errors[rank] = max(error, errors.get(rank, error))
    failed = sorted(
        (rank for rank, error in errors.items() if error.margin > 1.0),
        key=lambda rank: (-errors[rank].margin, -errors[rank].error, rank),
    )
    worst = max(errors.values())
    conflicts = _conflicts(holdings)
    undefined = sum(holding.copies * sums.undefined for holding, sums in parts)
    notes = list(
        dict.fromkeys(holding.measured.note for holding in holdings if holding.measured.note)
    )
    if not cover.even:
        notes.append(Note(Remark.UNEVEN, cover.least, cover.most))
    if failed and worst.is_element:
        notes.append(Note(Remark.ELEMENT))
    outcome, reason = Outcome.PASS, None
    if conflicts and (failed or alike):
        outcome = Outcome.REPLICA_CONFLICT
        notes.append(Note(Remark.REPLICAS, ranks=conflicts))
    elif failed:
        outcome = Outcome.DIVERGED
    elif undefined:
        outcome, reason = Outcome.UNCHECKED, Reason.UNDEFINED
        notes.append(Note(Reason.UNDEFINED, undefined))
    elif tolerance.is_noise:
        outcome, reason = Outcome.UNCHECKED, Reason.NONDETERMINISTIC
        notes.append(Note(Reason.NONDETERMINISTIC, tolerance.repeated))
    elif tolerance.blind:
        outcome, reason = Outcome.UNCHECKED, Reason.BLIND
        notes.append(Note(Reason.BLIND, tolerance.value, tolerance.bound))
    elif conflicts:
        notes.append(Note(Remark.REPLICAS_ROUNDED, ranks=conflicts))
    return verdict(
        outcome,
        failed or (conflicts if outcome.is_failure else ranks),
        *notes,
        placement=placement,
        reason=reason,
        error=worst.error,
        tolerance=worst.tolerance,
        eps=tolerance.unit or eps,
    )


def _must_agree(key: TraceKey, tolerances: Tolerances) -> bool:
    """Whether copies of a tensor have the same bits: what a deterministic update leaves.

    An update that is missing on some ranks is within the tolerance of the weight, if the learning
    rate is low or the weight has 16 bits. These hide copies of main weights that drift apart.
    """
    return is_updated(key) and tolerances.is_repeated(key)


def _ranks(holdings: Iterable[Holding]) -> list[int]:
    """Each rank as often as it holds a part, in rising order."""
    return sorted(rank for holding in holdings for rank in holding.ranks)


def _wholes(parts: Sequence[_Part]) -> Iterator[_Part]:
    """What each rank holds; for partial tensors the error of their sum, the same for all ranks."""
    yield from (part for part in parts if not part[0].measured.partial_over)
    yield from summed(part for part in parts if part[0].measured.partial_over)


def summed(parts: Iterable[_Part]) -> Iterator[_Part]:
    """Each with the error of the sum of all that have the same elements, by their sketches."""
    partials: dict[object, list[_Part]] = {}
    for holding, sums in parts:
        partials.setdefault(holding.measured.region, []).append((holding, sums))
    for group in partials.values():
        diff = squared_norm(
            [holding.measured.sketch for holding, _ in group for _ in range(holding.copies)]
        )
        for holding, sums in group:
            # Of the sum no element is known.
            yield holding, dataclasses.replace(sums, diff=diff, worst=0.0)


def _conflicts(holdings: Iterable[Holding]) -> tuple[int, ...]:
    """Ranks that hold the same elements, of which no sum is taken, but not the same bits."""
    return conflicting(
        (rank, holding.measured.region, sums.checksum)
        for holding in holdings
        if (sums := holding.measured.sums) and sums.n and not holding.measured.partial_over
        for rank in holding.ranks
    )


def conflicting(parts: Iterable[tuple[int, object, int]]) -> tuple[int, ...]:
    """Ranks that hold the same elements but not the same bits, from (rank, region, checksum)."""
    by_region: dict[object, dict[int, list[int]]] = {}
    for rank, region, checksum in parts:
        by_region.setdefault(region, {}).setdefault(checksum, []).append(rank)
    differing = (marks.values() for marks in by_region.values() if len(marks) > 1)
    return tuple(sorted(rank for marks in differing for ranks in marks for rank in ranks))


def verdict_of(
    key: TraceKey,
    shape: tuple[int, ...],
    outcome: Outcome,
    ranks: Iterable[int],
    *notes: Note | None,
    placement: str = "",
    reason: Reason | None = None,
    error: float | None = None,
    tolerance: float | None = None,
    eps: float = 1.0,
) -> Judged:
    """A verdict; its margin follows from the rest."""
    margin = None if error is None else margin_of(error, tolerance or 0.0)
    return Judged(
        iteration=key.iteration,
        microbatch=key.microbatch,
        kind=key.kind,
        name=key.name,
        index=key.index,
        verdict=outcome,
        rel_err=error,
        rel_err_eps=None if error is None else error / eps,
        tolerance=tolerance,
        margin=margin,
        ranks=tuple(ranks),
        placement=placement,
        shape=shape,
        notes=tuple(filter(None, notes)),
        reason=reason,
    )
