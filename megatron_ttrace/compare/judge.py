# SPDX-License-Identifier: Apache-2.0
"""One verdict per logical tensor, from what all ranks measured."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron_ttrace.compare.gathered import Covered, Holding, coverage_of
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.sketch import squared_norm
from megatron_ttrace.compare.tolerance import PartError, Tolerance, Tolerances, margin_of
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Outcome, TraceKey


def judge(
    expected: Iterable[tuple[TraceKey, tuple[int, ...]]],
    held: Iterable[Holding],
    tolerances: Tolerances,
    eps: float,
    unjudged: Callable[[TraceKey, Sequence[Measured]], Reason | None] = lambda key, holders: None,
) -> list[Judged]:
    """One verdict for every tensor of the reference or of any rank.

    Args:
        expected: keys and logical shapes of the reference's traced iteration, in execution order.
        held: what all ranks found.
        tolerances: of the reference.
        eps: machine epsilon of the job's compute dtype, for printing errors in its multiples.
        unjudged: why a tensor that these ranks hold cannot be compared in this layout; ``None`` if
            it can.
    """
    by_key: dict[TraceKey, list[Holding]] = {}
    for holder in held:
        by_key.setdefault(holder.measured.key, []).append(holder)
    covered = functools.cache(coverage_of)  # most tensors of a model share a layout
    verdicts = []
    for key, shape in expected:
        holders = by_key.pop(key, [])
        if reason := unjudged(key, [holder.measured for holder in holders]):
            note = Note(reason)
            verdicts.append(verdict_of(key, shape, Outcome.UNCHECKED, [], note, reason=reason))
        else:
            limit = tolerances.of(key)
            verdicts.append(_judge(key, shape, holders, limit, eps=eps, covered=covered))
    for key, holders in by_key.items():
        shape = holders[0].measured.logical_shape
        verdicts.append(verdict_of(key, shape, Outcome.EXTRA, _ranks(holders), Note(Remark.EXTRA)))
    return verdicts


def _judge(
    key: TraceKey,
    shape: tuple[int, ...],
    holders: Sequence[Holding],
    tolerance: Tolerance,
    *,
    eps: float,
    covered: Covered,
) -> Judged:
    verdict = functools.partial(verdict_of, key, shape)
    if not holders and 0 in shape:
        # An expert that no token of a microbatch chose: no rank needs to have it.
        return verdict(Outcome.PASS, [], Note(Remark.EMPTY))
    if not holders:
        return verdict(Outcome.MISSING, [], Note(Remark.MISSING))
    if misfits := [held for held in holders if held.measured.problem or held.measured.sums is None]:
        note = min(misfits, key=lambda held: held.ranks).measured.note
        return verdict(Outcome.SHAPE, _ranks(misfits), note)
    ranks = _ranks(holders)
    placement = min(holders, key=lambda held: held.ranks).measured.placement
    if bad := [held for held in holders if held.measured.sums and held.measured.sums.nonfinite]:
        note = Note(Remark.NONFINITE)
        return verdict(Outcome.NONFINITE, _ranks(bad), note, placement=placement)
    cover = covered(
        shape, tuple(held.measured.boxes for held in holders for _ in range(held.copies))
    )
    if not cover.complete:
        return verdict(Outcome.UNCOVERED, ranks, Note(Remark.UNCOVERED), placement=placement)
    errors: dict[int, PartError] = {}
    for held, sums in _wholes(holders):
        error = tolerance.error_of(sums)
        for rank in held.ranks:
            errors[rank] = max(error, errors.get(rank, error))
    failed = sorted(
        (rank for rank, error in errors.items() if error.margin > 1.0),
        key=lambda rank: (-errors[rank].margin, -errors[rank].error, rank),
    )
    worst = max(errors.values())
    conflicts = conflicting(
        (rank, held.measured.region, held.measured.sums.checksum)
        for held in holders
        if held.measured.sums is not None
        and held.measured.sums.n
        and not held.measured.partial_over
        for rank in held.ranks
    )
    undefined = sum(
        held.copies * held.measured.sums.undefined for held in holders if held.measured.sums
    )
    notes = list(dict.fromkeys(held.measured.note for held in holders if held.measured.note))
    if not cover.even:
        notes.append(Note(Remark.UNEVEN, cover.least, cover.most))
    outcome, reason = Outcome.PASS, None
    if failed:
        outcome = Outcome.DIVERGED
        if conflicts:
            outcome = Outcome.REPLICA_CONFLICT
            notes.append(Note(Remark.REPLICAS, ranks=conflicts))
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
        failed or ranks,
        *notes,
        placement=placement,
        reason=reason,
        error=worst.error,
        tolerance=worst.tolerance,
        eps=tolerance.unit or eps,
    )


def _ranks(holders: Iterable[Holding]) -> list[int]:
    """Each rank as often as it holds a part, in rising order."""
    return sorted(rank for holder in holders for rank in holder.ranks)


def _wholes(holders: Sequence[Holding]) -> Iterator[tuple[Holding, Sums]]:
    """What each rank holds; for partial tensors the error of their sum, the same for all ranks."""
    for held in holders:
        if held.measured.sums and not held.measured.partial_over:
            yield held, held.measured.sums
    yield from summed(held for held in holders if held.measured.partial_over)


def summed(holders: Iterable[Holding]) -> Iterator[tuple[Holding, Sums]]:
    """Each with the error of the sum of all that have the same elements, by their sketches."""
    partials: dict[object, list[tuple[Holding, Sums]]] = {}
    for held in holders:
        if held.measured.sums is not None:
            partials.setdefault(held.measured.region, []).append((held, held.measured.sums))
    for group in partials.values():
        diff = squared_norm([held.measured.sketch for held, _ in group for _ in range(held.copies)])
        for held, sums in group:
            yield held, dataclasses.replace(sums, diff=diff)


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
