# SPDX-License-Identifier: Apache-2.0
"""From what all ranks measured to one verdict per logical tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from megatron_ttrace.compare.measure import Sums, relative_error
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.sketch import squared_norm
from megatron_ttrace.compare.tolerance import Tolerance, Tolerances
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.coverage import Coverage, coverage
from megatron_ttrace.trace.records import Outcome, Reason, TraceKey, Verdict

_NOTES = {
    Reason.DISPATCHED: "dispatched: this token dispatcher cannot be followed (alltoall and "
    "allgather can); its layer is judged as a whole",
}
"""Of what this layout does not allow to compare."""


def judge(
    expected: Iterable[tuple[TraceKey, tuple[int, ...]]],
    measured: Mapping[int, Sequence[Measured]],
    tolerances: Tolerances,
    eps: float,
    unjudged: Callable[[TraceKey], Reason | None] = lambda key: None,
) -> list[Verdict]:
    """One verdict for every tensor of the reference or of any rank.

    Args:
        expected: keys and logical shapes of the reference's traced iteration, in execution order.
        measured: what each rank found.
        tolerances: of the reference.
        eps: machine epsilon of the compute dtype, for printing errors in its multiples.
        unjudged: why a tensor cannot be compared in this layout; ``None`` for all that can.
    """
    by_key: dict[TraceKey, list[tuple[int, Measured]]] = {}
    for rank, found in measured.items():
        for one in found:
            by_key.setdefault(one.key, []).append((rank, one))
    covered: dict[object, Coverage] = {}
    verdicts = []
    for key, shape in expected:
        holders = by_key.pop(key, [])
        reason = unjudged(key)
        if reason:
            note = _NOTES[reason]
            verdicts.append(_verdict(key, shape, Outcome.UNCHECKED, [], note=note, reason=reason))
            continue
        verdicts.append(_judge(key, shape, holders, tolerances.of(key), eps, covered))
    for key, holders in by_key.items():
        verdicts.append(
            _verdict(
                key,
                holders[0][1].logical_shape,
                Outcome.EXTRA,
                [rank for rank, _ in holders],
                note="the reference has no such tensor",
            )
        )
    return verdicts


def _judge(
    key: TraceKey,
    shape: tuple[int, ...],
    holders: Sequence[tuple[int, Measured]],
    tolerance: Tolerance,
    eps: float,
    covered: dict[object, Coverage],
) -> Verdict:
    if not holders and 0 in shape:
        # An expert that no token of a microbatch chose; nobody need have nothing.
        note = "empty: no element to compare"
        return _verdict(key, shape, Outcome.PASS, [], note=note)
    if not holders:
        return _verdict(
            key, shape, Outcome.MISSING, [], note="no rank of the candidate has this tensor"
        )
    misfits = [(rank, one) for rank, one in holders if one.problem or one.sums is None]
    if misfits:
        return _verdict(
            key, shape, Outcome.SHAPE, [rank for rank, _ in misfits], note=misfits[0][1].note
        )
    ranks = [rank for rank, _ in holders]
    placement = holders[0][1].placement
    bad = [rank for rank, one in holders if one.sums and one.sums.nonfinite]
    if bad:
        return _verdict(
            key, shape, Outcome.NONFINITE, bad, placement=placement, note="NaN or infinity"
        )
    held = _covered(shape, [one.boxes for _, one in holders], covered)
    if not held.complete:
        return _verdict(
            key,
            shape,
            Outcome.UNCOVERED,
            ranks,
            placement=placement,
            note="some elements are held by no rank",
        )
    errors: dict[int, float] = {}
    for rank, sums in _wholes(holders):
        errors[rank] = max(relative_error(sums, tolerance.rms), errors.get(rank, 0.0))
    worst = max(errors.values())
    value = tolerance.value
    margin = worst / value if value else (0.0 if worst == 0.0 else math.inf)
    failed = [rank for rank, error in errors.items() if error > value]
    conflicts = _conflicting(holders)
    notes = list(dict.fromkeys(one.note for _, one in holders if one.note))
    notes += [] if held.even else [f"held unevenly: {held.least} to {held.most} replicas"]
    reason: Reason | None = None
    if failed:
        outcome = Outcome.DIVERGED
        if conflicts:
            outcome = Outcome.REPLICA_CONFLICT
            notes.append(f"replicas differ between ranks {_list(conflicts)}")
        speaks = failed
    elif undefined := sum(one.sums.undefined for _, one in holders if one.sums):
        outcome, reason = Outcome.UNCHECKED, Reason.UNDEFINED
        notes.append(f"undefined: {undefined} elements are NaN in both runs")
        speaks = ranks
    elif tolerance.blind:
        outcome, reason = Outcome.UNCHECKED, Reason.BLIND
        notes.append(f"blind: rounding alone moves it by {value:.0%} (bound {tolerance.bound:.0%})")
        speaks = ranks
    else:
        outcome = Outcome.PASS
        if conflicts:
            notes.append(f"replicas differ in rounding on ranks {_list(conflicts)}")
        speaks = ranks
    return Verdict.of(
        key,
        verdict=outcome,
        rel_err=worst,
        rel_err_eps=worst / eps,
        tolerance=value,
        margin=margin,
        ranks=tuple(sorted(speaks, key=lambda rank: (-errors[rank], rank)) if failed else speaks),
        placement=placement,
        shape=shape,
        note="; ".join(notes),
        reason=reason,
    )


def _wholes(holders: Sequence[tuple[int, Measured]]) -> Iterator[tuple[int, Sums]]:
    """What each rank holds; for partial tensors the error of their sum, the same for all ranks."""
    partials: dict[object, list[tuple[int, Measured]]] = {}
    for rank, one in holders:
        if one.sums is None:
            continue
        if one.sketch:
            region = tuple(box.region for box in one.boxes)
            partials.setdefault(region, []).append((rank, one))
        else:
            yield rank, one.sums
    for group in partials.values():
        diff = squared_norm([one.sketch for _, one in group])
        for rank, one in group:
            if one.sums is not None:
                yield rank, dataclasses.replace(one.sums, diff=diff)


def _conflicting(holders: Sequence[tuple[int, Measured]]) -> list[int]:
    """Ranks that hold the same box but not the same bits."""
    by_region: dict[object, dict[int, list[int]]] = {}
    for rank, one in holders:
        if one.sums is not None and one.sums.n and not one.sketch:
            region = tuple(box.region for box in one.boxes)
            by_region.setdefault(region, {}).setdefault(one.sums.checksum, []).append(rank)
    return sorted(
        rank
        for marks in by_region.values()
        if len(marks) > 1
        for ranks in marks.values()
        for rank in ranks
    )


def _covered(
    shape: tuple[int, ...], boxes: Sequence[tuple[Box, ...]], memo: dict[object, Coverage]
) -> Coverage:
    """Most tensors of a model share a layout: each distinct one is counted once."""
    question = (shape, tuple(boxes))
    if question not in memo:
        memo[question] = coverage(shape, [box for held in boxes for box in held])
    return memo[question]


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _verdict(
    key: TraceKey,
    shape: tuple[int, ...],
    outcome: Outcome,
    ranks: Sequence[int],
    *,
    placement: str = "",
    note: str = "",
    reason: Reason | None = None,
) -> Verdict:
    return Verdict.of(
        key,
        verdict=outcome,
        rel_err=None,
        rel_err_eps=None,
        tolerance=None,
        margin=None,
        ranks=tuple(ranks),
        placement=placement,
        shape=shape,
        note=note,
        reason=reason,
    )
