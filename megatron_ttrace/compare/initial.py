# SPDX-License-Identifier: Apache-2.0
"""Are Megatron's own initial values those of one device, in distribution?

Another layout draws other random numbers, so elements cannot be compared. Constants can: they are
equal or wrong. Of the rest mean and variance are, with a bound that holds for every number of
elements; ranks that hold the same part must hold the same bits, and parts that are not the same
must not. docs/tolerance.md derives the rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.moments import Moments
from megatron_ttrace.mcore.roles import without_number
from megatron_ttrace.placement.coverage import coverage
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import Kind, Outcome, Reason, TraceKey, Verdict

LIMIT = 36.0
"""Square of the number of standard errors that pass."""

FEW = 8
"""Fewer random numbers are not judged: in bf16 four of them may well be equal by chance."""

_TWIN = "are bit by bit those of"

Region = tuple[Any, ...]
Holder = tuple[int, Measured]


def distance(own: Moments, reference: Moments) -> tuple[float, float]:
    """How far two samples are from being of one distribution.

    Means: ``nu ln(1 + t²/nu)`` of Student's t with ``nu`` degrees of freedom. Variances:
    Bartlett's ``d ln(p/v) + d' ln(p/v')``, ``p`` being the pooled variance. Of normal samples
    neither exceeds ``x`` with a probability above ``exp(-x/2)`` on either side (Chernoff bounds),
    whatever the sample sizes; both tend to the square of the number of standard errors. Tails
    heavier than the normal's count as fewer degrees of freedom: ``2 (n - 1) / (kurtosis - 1)``
    (Shoemaker, The American Statistician 57, 2003), by the reference's kurtosis.

    Returns:
        The larger statistic, and the relative error (of the mean, in standard deviations, or of the
        standard deviation) that one standard error is.
    """
    free = own.n + reference.n - 2
    pooled = (own.scatter + reference.scatter) / free
    per_mean = 1 / own.n + 1 / reference.n
    t_squared = (own.mean - reference.mean) ** 2 / (pooled * per_mean)
    means = free * math.log1p(t_squared / free)
    heavy = 2 / (max(reference.kurtosis, 3.0) - 1)
    spreads = 0.0
    for one in (own, reference):
        variance = one.std**2
        spreads += heavy * (one.n - 1) * math.log(pooled / variance) if variance else math.inf
    if means > spreads:
        return means, math.sqrt(per_mean)
    return max(spreads, 0.0), math.sqrt(per_mean / (2 * heavy))


def judge(
    expected: Mapping[TraceKey, tuple[tuple[int, ...], Moments]],
    measured: Mapping[int, Sequence[Measured]],
    eps: float,
) -> list[Verdict]:
    """One verdict for every parameter whose initial values either side measured.

    Args:
        expected: logical shape and moments of the reference's parameters.
        measured: what each rank found.
        eps: machine epsilon of the compute dtype, for printing errors in its multiples.
    """
    held: dict[TraceKey, list[Holder]] = {key: [] for key in expected}
    for rank, found in measured.items():
        for one in found:
            if one.key.kind is Kind.INITIAL and one.moments is not None:
                held.setdefault(one.key, []).append((rank, one))
    twins = _twins(held, expected)
    return [_judge(key, expected.get(key), held[key], twins, eps) for key in held]


@dataclasses.dataclass(frozen=True, slots=True)
class _Finding:
    outcome: Outcome
    note: str = ""
    ranks: Sequence[int] = ()
    error: float | None = None
    tolerance: float | None = None
    reason: Reason | None = None


def _judge(
    key: TraceKey,
    expected: tuple[tuple[int, ...], Moments] | None,
    holders: Sequence[Holder],
    twins: Mapping[tuple[TraceKey, Region], tuple[bool, str]],
    eps: float,
) -> Verdict:
    shape = expected[0] if expected else holders[0][1].logical_shape
    parts = _parts(holders)
    found = _unjudged(expected, holders, parts) or _broken(key, holders, parts, twins)
    if found is None:
        assert expected is not None
        found = _compare(expected[1], parts)
        elsewhere = [twins[key, region][1] for region in parts if (key, region) in twins]
        if elsewhere and found.outcome is Outcome.PASS:
            # Another layer with the same start is no wrong start of this one. It is told.
            found = dataclasses.replace(found, note=elsewhere[0], reason=Reason.TWIN)
    error, tolerance = found.error, found.tolerance
    return Verdict.of(
        key,
        verdict=found.outcome,
        rel_err=error,
        rel_err_eps=None if error is None else error / eps,
        tolerance=tolerance,
        margin=None if error is None else _ratio(error, tolerance or 0.0),
        ranks=tuple(found.ranks or (rank for rank, _ in holders)),
        placement=holders[0][1].placement if holders else "",
        shape=shape,
        note=found.note,
        reason=found.reason,
    )


def _unjudged(
    expected: tuple[tuple[int, ...], Moments] | None,
    holders: Sequence[Holder],
    parts: Mapping[Region, Sequence[Holder]],
) -> _Finding | None:
    """Where there is nothing to compare, if there is not. The parameter itself has a verdict."""
    note = ""
    boxes = [box for region in parts.values() for box in region[0][1].boxes]
    if expected is None or not holders:
        note = "only one of the runs has it"
    elif any(one.logical_shape != expected[0] for _, one in holders):
        note = f"the whole tensor is {expected[0]} in the reference"
    elif expected[1].nonfinite:
        note = "the reference's initial values are no numbers"
    elif sum(box.numel for box in boxes) != math.prod(expected[0]):
        note = "its parts overlap, or are not all of it"
    elif not coverage(expected[0], boxes).complete:
        note = "its parts are not all of it"
    return _unchecked(note) if note else None


def _unchecked(note: str) -> _Finding:
    reason = Reason.INITIAL_VALUES
    return _Finding(Outcome.UNCHECKED, f"{reason.value}: {note}", reason=reason)


def _broken(
    key: TraceKey,
    holders: Sequence[Holder],
    parts: Mapping[Region, Sequence[Holder]],
    twins: Mapping[tuple[TraceKey, Region], tuple[bool, str]],
) -> _Finding | None:
    """What is wrong whatever the distribution is."""
    if bad := [rank for rank, one in holders if _moments(one).nonfinite]:
        return _Finding(Outcome.NONFINITE, "NaN or infinity", bad)
    conflicts = [
        rank
        for group in parts.values()
        if len({_moments(one).checksum for _, one in group}) > 1
        for rank, _ in group
    ]
    if conflicts:
        note = "initial values differ between ranks that hold the same part"
        return _Finding(Outcome.REPLICA_CONFLICT, note, sorted(conflicts))
    if alike := [region for region in parts if twins.get((key, region), (False,))[0]]:
        ranks = [rank for region in alike for rank, _ in parts[region]]
        note = twins[key, alike[0]][1]
        return _Finding(Outcome.DIVERGED, note, sorted(ranks), reason=Reason.TWIN)
    return None


def _compare(reference: Moments, parts: Mapping[Region, Sequence[Holder]]) -> _Finding:
    """Compare the whole, and each part alone: else many right parts hide a wrong one."""
    found = {region: _moments(group[0][1]) for region, group in parts.items()}
    total = sum(found.values(), Moments())
    if reference.n < FEW and not reference.is_constant:
        return _unchecked(f"fewer than {FEW} random numbers")
    if reference.is_constant or total.is_constant:
        return _constant(reference, total, parts)
    tests: list[tuple[float, Moments, tuple[int, ...]]] = [(LIMIT, total, ())]
    if len(parts) > 1:
        # More tests, more alarms: together the parts may raise half as many as the whole.
        limit = LIMIT + 2 * math.log(2 * len(parts))
        tests += [
            (limit, own, tuple(rank for rank, _ in parts[region]))
            for region, own in found.items()
            if own.n >= FEW
        ]
    measured = [(*distance(own, reference), limit, own, ranks) for limit, own, ranks in tests]
    worst = max(measured, key=lambda one: one[0] / one[2])
    statistic, unit, limit, own, _ = worst
    error, tolerance = math.sqrt(statistic) * unit, math.sqrt(limit) * unit
    if statistic <= limit:
        return _Finding(Outcome.PASS, "", (), error, tolerance)
    wrong = [rank for one in measured if one[0] > one[2] for rank in one[4]]
    note = f"initial values differ in distribution: {_told(own, reference)}"
    return _Finding(Outcome.DIVERGED, note, sorted(wrong), error, tolerance)


def _constant(
    reference: Moments, total: Moments, parts: Mapping[Region, Sequence[Holder]]
) -> _Finding:
    """At least one side is one value only: both must be that."""
    values = reference.least, reference.most
    if (total.least, total.most) == values:
        return _Finding(Outcome.PASS, "", (), 0.0, 0.0)
    if reference.n == 1:
        return _unchecked("one value has no distribution")
    what = "lost" if total.is_constant and not reference.is_constant else "not the reference's"
    wrong = [
        rank
        for group in parts.values()
        for rank, one in group
        if not reference.is_constant or (_moments(one).least, _moments(one).most) != values
    ]
    note = f"initial values are {what}: {_told(total, reference)}"
    return _Finding(Outcome.DIVERGED, note, sorted(wrong), math.inf, 0.0)


def cause(verdict: Verdict) -> Cause:
    """The sort of a failure."""
    if verdict.verdict is Outcome.REPLICA_CONFLICT or verdict.reason is Reason.TWIN:
        return Cause.RANDOM_STATE
    return Cause.INITIAL_VALUES


def _told(own: Moments, reference: Moments) -> str:
    def of(one: Moments) -> str:
        if one.is_constant:
            return f"all {one.least:.6g}"
        return f"mean {one.mean:.3g}, std {one.std:.3g}"

    return f"{of(own)}; in the reference {of(reference)}"


def _twins(
    held: Mapping[TraceKey, Sequence[Holder]],
    expected: Mapping[TraceKey, tuple[tuple[int, ...], Moments]],
) -> dict[tuple[TraceKey, Region], tuple[bool, str]]:
    """Random parts that hold the very bits of another part: they were drawn from one state.

    Whole parameters that are equal in the reference as well are meant to be. Each comes with
    whether the other is a part of the same weight (experts of a layer count as one), and a note.
    """
    alike: dict[object, dict[tuple[TraceKey, Region], int]] = {}
    for key, holders in held.items():
        for region, group in _parts(holders).items():
            own = _moments(group[0][1])
            if own.n >= FEW and not own.is_constant and not own.nonfinite:
                alike.setdefault((own.n, own.checksum), {})[key, region] = group[0][0]
    found = {}
    for parts in alike.values():
        known = {expected[key][1].checksum if key in expected else key for key, _ in parts}
        several = len({key for key, _ in parts}) > 1
        if len(parts) < 2 or (several and len(known) == 1):
            continue
        for part, rank in parts.items():
            weight = _weight(part[0])
            others = [(_weight(k) == weight, k, r) for (k, g), r in parts.items() if (k, g) != part]
            near, other, at = max(others, key=lambda one: one[0])
            what = "another part of it" if other == part[0] else other.name
            found[part] = (
                near,
                f"initial values on rank {rank} {_TWIN} {what} on rank {at}",
            )
    return found


def _weight(key: TraceKey) -> str:
    """The name of a parameter, the same for all experts of a layer."""
    return without_number(key.name)


def notices(verdicts: Sequence[Verdict]) -> list[str]:
    """What is worth telling of initial values that pass: layers that begin with equal numbers."""
    alike = [
        v for v in verdicts if v.kind is Kind.INITIAL and v.is_luck and v.reason is Reason.TWIN
    ]
    if not alike:
        return []
    first = alike[0]
    return [
        f"{len(alike)} parameters begin with another layer's numbers: {first.name}: {first.note}"
    ]


def _parts(holders: Sequence[Holder]) -> dict[Region, list[Holder]]:
    """The distinct parts of a parameter, each with the ranks that hold it."""
    parts: dict[Region, list[Holder]] = {}
    for rank, one in holders:
        if _moments(one).n:
            region = tuple(box.region for box in one.boxes)
            parts.setdefault(region, []).append((rank, one))
    return parts


def _moments(one: Measured) -> Moments:
    assert one.moments is not None
    return one.moments


def _ratio(error: float, tolerance: float) -> float:
    if tolerance:
        return error / tolerance
    return math.inf if error else 0.0
