# SPDX-License-Identifier: Apache-2.0
"""Do initial values have the distribution that they have on one device?

Constants must be equal. Of random values the mean and the variance are compared; the reference's
own numbers must be in the same places. Ranks that hold the same part must hold the same bits;
different parts must not. docs/tolerance.md derives the rule.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from megatron_ttrace.compare.judge import conflicting, verdict_of
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.mcore.roles import without_number
from megatron_ttrace.placement.coverage import coverage
from megatron_ttrace.trace.findings import Cause, Note, Remark, Sample
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.moments import Moments
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Kind, Outcome, TraceKey

LIMIT = 36.0
"""Square of the number of standard errors that pass."""

FEW = 8
"""Of fewer random numbers no distribution is judged."""
_CHANCE = 32
"""Fewer random bits may well be equal by chance."""

_SAME = 1e-6
"""Sums over the same numbers in another order differ by less."""
_EXACT = 1e-12
"""The same, relative to the sum of absolute terms, if no number was rounded in between."""

Region = tuple[object, ...]
Expected = tuple[tuple[int, ...], Moments]
"""Shape and moments of a parameter in the reference."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Holder:
    """A rank that has a parameter, or a part of it."""

    rank: int
    tensor: Measured
    moments: Moments


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A part of a parameter, with the ranks that hold it; ``own`` are the first one's moments."""

    own: Moments
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, holder: _Holder) -> Self:
        return cls(holder.moments, (holder.rank,))


@dataclasses.dataclass(frozen=True, slots=True)
class _Twin:
    """A part that is bitwise equal to another; ``is_near``: to one of the same weight.

    ``is_own``: of the same parameter; ``one_state``: the ranks that hold the two had the same
    random state after drawing them.
    """

    is_near: bool
    is_own: bool
    one_state: bool
    note: Note


@dataclasses.dataclass(frozen=True, slots=True)
class _Finding:
    outcome: Outcome
    note: Note | None = None
    ranks: Sequence[int] = ()
    error: float | None = None
    tolerance: float | None = None
    reason: Reason | None = None


Parts = Mapping[Region, _Part]
Twins = Mapping[tuple[TraceKey, Region], _Twin]


def distance(own: Moments, reference: Moments) -> tuple[float, float]:
    """How far two samples are from having one distribution.

    Means: ``nu ln(1 + t²/nu)`` of Student's t with ``nu`` degrees of freedom. Variances:
    Bartlett's ``d ln(p/v) + d' ln(p/v')``, where ``p`` is the pooled variance. For normal samples
    of any size, neither exceeds ``x`` with a probability above ``exp(-x/2)`` on either side
    (Chernoff bounds); both tend to the square of the number of standard errors. Tails heavier than
    the normal's count as fewer degrees of freedom: ``2 (n - 1) / (kurtosis - 1)`` (Shoemaker, The
    American Statistician 57, 2003), with the reference's kurtosis.

    Returns:
        The larger statistic, and what one standard error is as a relative error (of the mean, in
        standard deviations, or of the standard deviation).
    """
    free = own.n + reference.n - 2
    pooled = (own.scatter + reference.scatter) / free
    per_mean = 1 / own.n + 1 / reference.n
    t_squared = (own.mean - reference.mean) ** 2 / (pooled * per_mean)
    means = free * math.log1p(t_squared / free)
    heavy = 2 / (max(reference.kurtosis, 3.0) - 1)
    spreads = 0.0
    for sample in (own, reference):
        variance = sample.std**2
        spreads += heavy * (sample.n - 1) * math.log(pooled / variance) if variance else math.inf
    if means > spreads:
        return means, math.sqrt(per_mean)
    return max(spreads, 0.0), math.sqrt(per_mean / (2 * heavy))


def judge(
    expected: Mapping[TraceKey, Expected], measured: Mapping[int, Sequence[Measured]], eps: float
) -> list[Judged]:
    """One verdict per parameter whose initial values either side measured.

    ``expected`` has the reference's; ``eps`` is the compute dtype's machine epsilon, in whose
    multiples errors are printed.
    """
    by_key: dict[TraceKey, list[_Holder]] = {key: [] for key in expected}
    for rank, tensors in measured.items():
        for tensor in tensors:
            if tensor.key.kind is Kind.INITIAL and tensor.moments is not None:
                holder = _Holder(rank, tensor, tensor.moments)
                by_key.setdefault(tensor.key, []).append(holder)
    parts = {key: _parts(holders) for key, holders in by_key.items()}
    twins = _twins(parts, expected)
    verdicts = []
    for key, holders in by_key.items():
        finding = _judge(key, expected.get(key), holders, parts[key], twins)
        verdicts.append(
            verdict_of(
                key,
                expected[key][0] if key in expected else holders[0].tensor.logical_shape,
                finding.outcome,
                finding.ranks or [holder.rank for holder in holders],
                finding.note,
                placement=holders[0].tensor.placement if holders else "",
                reason=finding.reason,
                error=finding.error,
                tolerance=finding.tolerance,
                eps=eps,
            )
        )
    return verdicts


def _judge(
    key: TraceKey, expected: Expected | None, holders: Sequence[_Holder], parts: Parts, twins: Twins
) -> _Finding:
    if expected is None or not holders:
        return _unchecked(Note(Reason.ONE_RUN))
    if bad := [holder.rank for holder in holders if holder.moments.nonfinite]:
        return _Finding(Outcome.NONFINITE, Note(Remark.UNINITIALISED), bad)
    if why := _incomparable(*expected, holders):
        return _unchecked(why)
    full, reference = [holder for holder in holders if holder.moments.n], expected[1]
    if reference.is_constant and reference.n > 1:
        # Copies of a constant, too, are each compared with it.
        each: dict[Region, _Part] = {(at,): _Part.of(holder) for at, holder in enumerate(full)}
        return _constant(reference, sum((h.moments for h in full), Moments()), each)
    if conflicts := conflicting((h.rank, h.tensor.region, h.moments.checksum) for h in full):
        differing = [_Part.of(holder) for holder in holders if holder.rank in conflicts]
        return _conflict(reference, conflicts, differing)
    finding = _compare(reference, parts)
    if finding.outcome is Outcome.DIVERGED:
        return finding
    total = sum((part.own for part in parts.values()), Moments())
    is_given = _are_same(total, reference)
    equal = {
        region: twin
        for region in parts
        if (twin := twins.get((key, region))) and not (is_given and twin.is_own)
    }
    if is_given and _displaced(total, reference, expected[0]):
        return _Finding(Outcome.DIVERGED, Note(Remark.DISPLACED))
    if near := [region for region, twin in equal.items() if twin.is_near]:
        ranks = sorted(rank for region in near for rank in parts[region].ranks)
        drawn = all(equal[region].one_state for region in near)
        reason = Reason.RANDOM_STATE if drawn else Reason.TWIN
        return _Finding(Outcome.DIVERGED, equal[near[0]].note, ranks, reason=reason)
    if equal and finding.outcome is Outcome.PASS:
        # Each of two layers with the same values is right by itself, so both pass, with a note.
        note = next(iter(equal.values())).note
        return dataclasses.replace(finding, note=note, reason=Reason.TWIN)
    return finding


def _unchecked(note: Note) -> _Finding:
    return _Finding(Outcome.UNCHECKED, note, reason=Reason.INITIAL_VALUES)


def _incomparable(
    shape: tuple[int, ...], reference: Moments, holders: Sequence[_Holder]
) -> Note | None:
    """Why the parts cannot be compared, if so. What is wrong then has a verdict as ``param``."""
    if any(holder.tensor.logical_shape != shape for holder in holders):
        return Note(Remark.OTHER_SHAPE, text=str(shape))
    if reference.nonfinite:
        return Note(Remark.REFERENCE_NONFINITE)
    distinct = {h.tensor.region: h.tensor.boxes for h in holders if h.moments.n}
    boxes = [box for part in distinct.values() for box in part]
    if sum(box.numel for box in boxes) != math.prod(shape):
        return Note(Remark.OVERLAP)
    return None if coverage(shape, boxes).complete else Note(Remark.INCOMPLETE)


def _conflict(reference: Moments, ranks: Sequence[int], parts: Sequence[_Part]) -> _Finding:
    """Copies that differ: uninitialised memory does so too, but not in random numbers.

    A copy without the reference's distribution is what is wrong. If all have it, and none is
    another one rearranged or scaled, they are random numbers of different streams.
    """
    conflict = _Finding(Outcome.REPLICA_CONFLICT, Note(Remark.INITIAL_REPLICAS), ranks)
    if any(min(part.own.n, reference.n) < FEW for part in parts):
        return conflict
    finding = _tested(reference, [(_limit(len(parts)), part) for part in parts])
    if finding.outcome is Outcome.DIVERGED:
        return finding
    apart = {part.own.checksum: part.own for part in parts}.values()
    if any(_related(*pair) for pair in itertools.combinations(apart, 2)):
        return conflict
    return dataclasses.replace(conflict, reason=Reason.RANDOM_STATE)


def _related(*samples: Moments) -> bool:
    """Whether two samples can have the same numbers, up to their order and one factor."""
    ours, theirs = (
        (m.least, m.most, m.mean, math.sqrt(m.squares / m.n), (m.fourths / m.n) ** 0.25)
        for m in samples
    )
    scale = theirs[3] / ours[3]
    return len({m.n for m in samples}) == 1 and all(
        math.isclose(scale * a, b, rel_tol=_SAME, abs_tol=_SAME * theirs[3])
        for a, b in zip(ours, theirs, strict=True)
    )


def _are_same(own: Moments, reference: Moments) -> bool:
    """Whether the numbers are the reference's, thus not drawn by this layout."""
    size, limit = _size(reference), reference.n * _EXACT
    sums = ("least", 0.0), ("most", 0.0), ("sum", size), ("squares", size**2)
    return all(abs(getattr(own, at) - getattr(reference, at)) <= of * limit for at, of in sums)


def _displaced(own: Moments, reference: Moments, shape: tuple[int, ...]) -> bool:
    """Whether the same numbers are in other places."""
    if not (own.places and reference.places):
        return False
    weights = sum(dim * length for dim, length in enumerate(shape, 1))
    limit = reference.n * _EXACT * _size(reference)
    return abs(own.places - reference.places) > weights * limit


def _size(moments: Moments) -> float:
    return math.sqrt(moments.squares / moments.n)


def _bits(moments: Moments) -> int:
    """At least how many random bits there are: bf16 has eight for each number."""
    rounded = ((256 * math.frexp(end)[0]).is_integer() for end in (moments.least, moments.most))
    return moments.n * (8 if all(rounded) else 23)


def _limit(tests: int) -> float:
    """More tests, more alarms: all parts together may raise half as many as the whole."""
    return LIMIT + 2 * math.log(2 * tests)


def _compare(reference: Moments, parts: Parts) -> _Finding:
    """Compare the whole and each part alone: one wrong part of many hardly changes the whole."""
    total = sum((part.own for part in parts.values()), Moments())
    lost = total.is_constant and _bits(total) > _CHANCE
    if reference.n < FEW and not (reference.is_constant or lost):
        return _unchecked(Note(Remark.FEW_VALUES, limit=FEW))
    if reference.is_constant or total.is_constant:
        return _constant(reference, total, parts)
    tests: list[tuple[float, _Part]] = [(LIMIT, _Part(total, ()))]
    if len(parts) > 1:
        tests += [(_limit(len(parts)), part) for part in parts.values() if part.own.n >= FEW]
    return _tested(reference, tests)


def _tested(reference: Moments, tests: Sequence[tuple[float, _Part]]) -> _Finding:
    """Compare parts with the reference, each with its limit; the worst one is reported."""
    measured = [(*distance(part.own, reference), limit, part) for limit, part in tests]
    statistic, unit, limit, worst = max(measured, key=lambda test: test[0] / test[2])
    error, tolerance = math.sqrt(statistic) * unit, math.sqrt(limit) * unit
    if statistic <= limit:
        return _Finding(Outcome.PASS, None, (), error, tolerance)
    wrong = sorted(rank for value, _, most, part in measured if value > most for rank in part.ranks)
    note = Note(Remark.DISTRIBUTION, samples=_samples(worst.own, reference))
    return _Finding(Outcome.DIVERGED, note, wrong, error, tolerance)


def _constant(reference: Moments, total: Moments, parts: Parts) -> _Finding:
    """Where either side is one value only, both must be that value."""
    values = reference.least, reference.most
    if (total.least, total.most) == values:
        return _Finding(Outcome.PASS, None, (), 0.0, 0.0)
    if reference.n == 1:
        return _unchecked(Note(Remark.ONE_VALUE))
    lost = total.is_constant and not reference.is_constant
    wrong = sorted(
        rank
        for part in parts.values()
        for rank in part.ranks
        if not reference.is_constant or (part.own.least, part.own.most) != values
    )
    remark = Remark.LOST if lost else Remark.NOT_THE_REFERENCES
    note = Note(remark, samples=_samples(total, reference))
    return _Finding(Outcome.DIVERGED, note, wrong, math.inf, 0.0)


def cause(verdict: Judged) -> Cause | None:
    """The sort of a failure, if it was tested.

    Equal parts were drawn from one state only if their ranks have one; else something may have
    overwritten one with the other, and nothing shows what.
    """
    if verdict.reason is Reason.RANDOM_STATE:
        return Cause.RANDOM_STATE
    unknown = verdict.verdict is Outcome.REPLICA_CONFLICT or verdict.reason is Reason.TWIN
    return None if unknown else Cause.INITIAL_VALUES


def _samples(*moments: Moments) -> tuple[Sample, ...]:
    return tuple(Sample(m.least, 0.0) if m.is_constant else Sample(m.mean, m.std) for m in moments)


def _twins(parts: Mapping[TraceKey, Parts], expected: Mapping[TraceKey, Expected]) -> Twins:
    """Random parts that are bitwise equal to another part.

    Parameters that are equal in the reference as well are meant to be. Experts of a layer count as
    one weight.
    """
    alike: dict[object, dict[tuple[TraceKey, Region], int]] = {}
    for key, mine in parts.items():
        for region, part in mine.items():
            own = part.own
            if not (own.is_constant or own.nonfinite) and _bits(own) >= _CHANCE:
                alike.setdefault((own.n, own.checksum), {})[key, region] = part.ranks[0]
    twins = {}
    for equal in alike.values():
        known = {expected[key][1].checksum if key in expected else key for key, _ in equal}
        several = len({key for key, _ in equal}) > 1
        if len(equal) < 2 or (several and len(known) == 1):
            continue
        for where, rank in equal.items():
            weight = without_number(where[0].name)
            near, other, there, at = max(
                (
                    (without_number(key.name) == weight, key, region, at)
                    for (key, region), at in equal.items()
                    if (key, region) != where
                ),
                key=operator.itemgetter(0),
            )
            is_own = other == where[0]
            text = "another part of it" if is_own else other.name
            states = {parts[key][region].own.state for key, region in (where, (other, there))}
            one_state = rank != at and len(states) == 1 and 0 not in states
            note = Note(Remark.SAME_START, ranks=(rank, at), text=text)
            twins[where] = _Twin(near, is_own, one_state, note)
    return twins


def alike(verdicts: Iterable[Judged]) -> list[Judged]:
    """Initial values that pass and are equal to those of another layer."""
    return [v for v in verdicts if v.is_luck and v.reason is Reason.TWIN]


def _parts(holders: Sequence[_Holder]) -> Parts:
    """The distinct parts of a parameter."""
    parts: dict[Region, _Part] = {}
    for holder in holders:
        if holder.moments.n:
            known = parts.get(holder.tensor.region, _Part(holder.moments, ()))
            parts[holder.tensor.region] = _Part(known.own, (*known.ranks, holder.rank))
    return parts
