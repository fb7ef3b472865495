# SPDX-License-Identifier: Apache-2.0
"""Whether each element is in a norm, a count, a reduction or an update once: coverage, not size.

A layer norm that is counted on every tensor-parallel rank changes the gradient norm by less than
its tolerance. So what each rank put in (trace/counted.py) is added up through the collectives, as
boxes, and every logical element must be in the result once, however small its share.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron_ttrace.compare.judge import verdict_of
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.coverage import Coverage, coverage
from megatron_ttrace.trace.counted import (
    Counted,
    Counting,
    HyperparametersIndex,
    Part,
    Runs,
    Statistic,
    Sum,
    Term,
    ranks_of,
)
from megatron_ttrace.trace.findings import (
    Cause,
    FaultNote,
    Finding,
    Lack,
    Miscounted,
    OtherHyperparameters,
    Remark,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, TraceKey

_REASONS = {
    Cause.COUNTED_TWICE: Reason.COUNTED_TWICE,
    Cause.NEVER_COUNTED: Reason.NEVER_COUNTED,
    Cause.OTHER_NORM: Reason.OTHER_NORM,
}

type _Numbers = dict[str, float]
"""Hyper-parameters by name."""
type _Parts = Counter[tuple[int, int]]
"""How often each rank's part is in a result: (rank, number of the part)."""
type _Collective = tuple[Runs, int]
"""The ranks of a collective, and its number among theirs."""


@dataclasses.dataclass(slots=True)
class _Miscount:
    """How often elements of a parameter are counted, and on which ranks, if not once."""

    cover: Coverage
    ranks: list[int] = dataclasses.field(default_factory=list)
    lack: Lack | None = None

    def add(self, rank: int, cover: Coverage) -> None:
        self.ranks.append(rank)
        self.cover = Coverage(min(self.cover.least, cover.least), max(self.cover.most, cover.most))


type _Wrong = dict[tuple[Cause, str], _Miscount]


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """What was found out about all statistics of a run.

    There is one verdict per statistic of a step, or one per parameter that is wrong in it, with a
    finding; ``not_judged`` are statistics with the reason.
    """

    verdicts: tuple[Judged, ...] = ()
    findings: Mapping[TraceKey, Finding] = dataclasses.field(default_factory=dict)
    not_judged: tuple[tuple[Statistic, str], ...] = ()


def judge(reference: Sequence[Counted], measured: Mapping[int, Sequence[Counted]]) -> Judgement:
    """Judge all statistics of all traced steps; what the reference never counts is not expected."""
    trusted = {counted.iteration: counted for counted in reference}
    verdicts: list[Judged] = []
    findings: dict[TraceKey, Finding] = {}
    not_judged: dict[tuple[Statistic, str], None] = {}
    for iteration in sorted({counted.iteration for each in measured.values() for counted in each}):
        right = trusted.get(iteration)
        ranks = {
            rank: counted
            for rank, each in measured.items()
            for counted in each
            if counted.iteration == iteration
        }
        for statistic in Statistic:
            countings = [c for counted in ranks.values() for c in _of(counted, statistic)]
            if not countings:
                # FSDP has no such buckets; what it reduces is judged by its values alone.
                if statistic is not Statistic.REDUCED and right and _of(right, statistic):
                    not_judged[statistic, "how it is computed"] = None
                continue
            if why := next((c.unknown for c in countings if c.unknown), ""):
                not_judged[statistic, why] = None
                continue
            key = TraceKey(iteration, STEP_LEVEL, Kind.COUNTED, statistic, statistic.number)
            wrong, shapes = _wrong(right, ranks, statistic)
            if not wrong:
                verdicts.append(verdict_of(key, (), Outcome.PASS, ranks))
            for cause, reason in _REASONS.items():
                names = tuple(name for other, name in wrong if other is cause)
                for name in names:
                    miscount, here = wrong[cause, name], dataclasses.replace(key, name=name)
                    cover = miscount.cover
                    finding = Miscounted(
                        cause,
                        statistic=statistic,
                        least=cover.least,
                        most=cover.most,
                        names=names,
                        lack=miscount.lack,
                    )
                    findings.setdefault(here, finding)
                    shape = shapes.get(name, ())[statistic is Statistic.REDUCED :]
                    note = FaultNote(reason, cover.least, cover.most, finding=finding)
                    verdicts.append(
                        verdict_of(
                            here, shape, Outcome.DIVERGED, miscount.ranks, note, reason=reason
                        )
                    )
        for index in HyperparametersIndex:
            held = {rank: _hyperparameters(counted, index) for rank, counted in ranks.items()}
            if not any(held.values()):
                continue
            others = _other_hyperparameters(_hyperparameters(right, index) if right else {}, held)
            key = TraceKey(iteration, STEP_LEVEL, Kind.HYPERPARAMETERS, Kind.HYPERPARAMETERS, index)
            if not others:
                verdicts.append(verdict_of(key, (), Outcome.PASS, ranks))
            for name, values in others.items():
                here = dataclasses.replace(key, name=name)
                other = OtherHyperparameters(
                    Cause.HYPERPARAMETERS,
                    values=tuple(values),
                    following=index is HyperparametersIndex.NEXT,
                )
                differ = FaultNote(Remark.HYPERPARAMETERS, finding=other)
                findings[here] = other
                differing = sorted({rank for members in values.values() for rank in members})
                verdicts.append(verdict_of(here, (), Outcome.DIVERGED, differing, differ))
    return Judgement(tuple(verdicts), findings, tuple(not_judged))


def _wrong(
    right: Counted | None, ranks: Mapping[int, Counted], statistic: Statistic
) -> tuple[_Wrong, Mapping[str, tuple[int, ...]]]:
    """What is wrong in any evaluation of a statistic, and the parameters' shapes."""
    wrong: _Wrong = {}
    expected = _names_in(right, statistic)
    evaluations = {rank: _evaluations(counted, statistic) for rank, counted in ranks.items()}
    for number in range(max(map(len, evaluations.values()))):
        step = _Step(ranks, statistic, {r: each[number:] for r, each in evaluations.items()})
        wrong = step.wrong(expected) | wrong
    if statistic is Statistic.CLIPPED:
        wrong |= _other_norms(right, ranks)
    return wrong, step.shapes


class _Step:
    """One evaluation of one statistic of one traced step, on all ranks."""

    def __init__(
        self,
        ranks: Mapping[int, Counted],
        statistic: Statistic,
        evaluations: Mapping[int, Sequence[Sequence[Counting]]],
    ) -> None:
        """Prepare; of each rank's ``evaluations`` the first one is judged."""
        self._ranks = ranks
        self._statistic = statistic
        self._result = {rank: each[0] if each else () for rank, each in evaluations.items()}
        self._sums: dict[_Collective, dict[int, tuple[Counting, Sum]]] = {}
        for rank, counted in ranks.items():
            for counting in _of(counted, statistic):
                for made in counting.made:
                    members = self._sums.setdefault((made.group, made.order), {})
                    members[rank] = counting, made
        self._values: dict[_Collective, _Parts] = {}
        self._known: dict[object, dict[str, Coverage]] = {}
        self._boxes: dict[object, dict[str, list[Box]]] = {}
        self._within_known: dict[object, Coverage] = {}
        parts = (c.parts[number] for c in ranks.values() for number in self._numbers(c))
        self.shapes = {self._name(part): part.shape for part in parts}

    def wrong(self, expected: frozenset[str] | None) -> _Wrong:
        """Parameters of which some elements are not counted once; ``expected`` as `_names_in`."""
        wrong: _Wrong = {}
        for rank in self._ranks:
            for name, cover in self._coverage(rank).items():
                if cover.most > 1:
                    cause = Cause.COUNTED_TWICE
                elif cover.least < 1 and (expected is None or module_of(name) in expected):
                    cause = Cause.NEVER_COUNTED
                else:
                    continue
                wrong.setdefault((cause, name), _Miscount(cover)).add(rank, cover)
        self._look_for({n: m for (cause, n), m in wrong.items() if cause is Cause.NEVER_COUNTED})
        names = (c.parts[number].name for c in self._ranks.values() for number in c.held)
        order = {name: position for position, name in enumerate(dict.fromkeys(names))}
        return dict(sorted(wrong.items(), key=lambda item: order.get(item[0][1], len(order))))

    def _look_for(self, missing: Mapping[str, _Miscount]) -> None:
        """Note why they are missing."""
        if not missing or self._statistic is Statistic.REDUCED:
            return
        shares = [
            (self._ranks[r], [t.number for c in each for t in _terms(c)])
            for r, each in self._result.items()
        ]
        has = {Lack.LEFT_OUT: _all_of(shares)}
        ranks = self._ranks.values()
        updates = [_of(counted, Statistic.STEPPED) for counted in ranks]
        # What an update is made of may be unknown, and an update may be skipped.
        if all(updates) and not any(c.unknown for update in updates for c in update):
            groups = [(c, [t.number for g in c.stepped for t in g.parts]) for c in ranks]
            stepped = [(c, _in(c, Statistic.STEPPED)) for c in ranks]
            has = {Lack.UNGROUPED: _all_of(groups), Lack.UNFILLED: _all_of(stepped), **has}
        for name, miscount in missing.items():
            results = (counting for rank in miscount.ranks for counting in self._result[rank])
            # Nothing is lost on the way to a rank that needs its own only, and gets no others'.
            sums = not self._statistic.is_local or any(counting.made for counting in results)
            other = Lack.LOST if sums else Lack.LEFT_OUT
            miscount.lack = next((lack for lack in has if name not in has[lack]), other)

    def _coverage(self, rank: int) -> dict[str, Coverage]:
        """How often a rank's result has the elements that it should have, by parameter."""
        countings = self._result[rank]
        if not countings:
            return {}
        parts = [(term.number, term.times) for c in countings for term in c.parts]
        sums = [
            ((c.made[term.number].group, c.made[term.number].order), term.times)
            for c in countings
            for term in c.sums
        ]
        # Ranks with the same result and no parts of their own need to be looked at once.
        same = (rank if parts else -1, tuple(parts), tuple(sums))
        if same not in self._boxes:
            total: _Parts = Counter()
            for number, times in parts:
                total[rank, number] += times
            for key, times in sums:
                _add(total, self._value(key), times)
            self._boxes[same] = self._by_name(total)
        boxes = self._boxes[same]
        if self._statistic.is_local:
            return self._within(rank, boxes, same)
        if same not in self._known:
            self._known[same] = {
                name: coverage(shape, boxes.get(name, ())) for name, shape in self.shapes.items()
            }
        return self._known[same]

    def _name(self, part: Part) -> str:
        """A result of the whole model has one of the copies that a rank holds, whichever."""
        return part.name if self._statistic.is_local else module_of(part.name)

    def _by_name(self, total: _Parts) -> dict[str, list[Box]]:
        boxes: dict[str, list[Box]] = {}
        for (holder, number), times in total.items():
            part = self._ranks[holder].parts[number]
            boxes.setdefault(self._name(part), []).extend(part.boxes * times)
        if self._statistic is Statistic.REDUCED:
            return {name: _stacked(pieces) for name, pieces in boxes.items()}
        return boxes

    def _within(
        self, rank: int, boxes: Mapping[str, list[Box]], same: object
    ) -> dict[str, Coverage]:
        """Of the elements that a rank needs."""
        asked: dict[str, list[Part]] = {}
        for part in self._own(self._ranks[rank]):
            asked.setdefault(part.name, []).append(part)
        covers = {}
        for name, parts in asked.items():
            if name not in self.shapes:
                continue
            # Replicas hold the same parts, which are one object if they were sent together.
            key = same, name, *map(id, parts)
            if key not in self._within_known:
                needed = [box for part in parts for box in self._asked(part)]
                self._within_known[key] = _covered(self.shapes[name], boxes.get(name, []), needed)
            covers[name] = self._within_known[key]
        return covers

    def _asked(self, part: Part) -> list[Box]:
        """What must be in a result; of a reduction, each element once from each rank."""
        if self._statistic is not Statistic.REDUCED or part.name not in self.shapes:
            return [*part.boxes]
        ranks = self.shapes[part.name][0]
        return [Box((0, *b.logical), (ranks, *b.extent), (0, *b.local)) for b in part.boxes]

    def _numbers(self, counted: Counted) -> Iterable[int]:
        """The parts whose shapes are those of this statistic."""
        of = self._statistic
        return _in(counted, of) if of is Statistic.REDUCED else counted.held

    def _own(self, counted: Counted) -> list[Part]:
        """What a rank holds; what it clips or reduces is what it steps, maybe a part of that."""
        numbers = counted.held
        if self._statistic in (Statistic.CLIPPED, Statistic.REDUCED):
            numbers = tuple(sorted({*_in(counted, Statistic.STEPPED)}))
        return [counted.parts[number] for number in numbers]

    def _value(self, key: _Collective) -> _Parts:
        """What the ranks of a group have put together into a collective."""
        if key not in self._values:
            self._values[key] = Counter()  # a cycle, which no run can make, ends here
            total: _Parts = Counter()
            members = self._sums.get(key, {})
            for rank in ranks_of(key[0]):
                if rank in members:
                    counting, made = members[rank]
                    for term in made.parts:
                        total[rank, term.number] += term.times
                    for term in made.sums:
                        earlier = counting.made[term.number]
                        _add(total, self._value((earlier.group, earlier.order)), term.times)
            self._values[key] = total
        return self._values[key]


def _covered(shape: Sequence[int], boxes: Sequence[Box], needed: Sequence[Box]) -> Coverage:
    """Coverage of what is needed; in the usual case without counting."""
    is_in_one = len(boxes) == 1 and all(_common(boxes[0], box) == box.numel for box in needed)
    pairs = itertools.combinations(boxes, 2)
    if is_in_one or (boxes == needed and not any(itertools.starmap(_common, pairs))):
        return Coverage(1, 1)
    return coverage(shape, boxes, needed)


def _common(box: Box, other: Box) -> int:
    """How many elements are in both."""
    sides = zip(box.logical, box.extent, other.logical, other.extent, strict=True)
    return math.prod(max(0, min(a + b, c + d) - max(a, c)) for a, b, c, d in sides)


def _stacked(boxes: list[Box]) -> list[Box]:
    """The same elements, with ranks that have equal pieces as one box: the first dim is theirs."""
    ranks: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for box in boxes:
        ranks.setdefault((box.logical[1:], box.extent[1:], box.local), []).append(box.logical[0])
    if any(box.extent[0] != 1 for box in boxes):
        return boxes
    stacks = []
    for (logical, extent, local), members in ranks.items():
        first, size = min(members), len(members)
        # One that is there twice stays so.
        together = sorted(members) == [*range(first, first + size)]
        spans = [(first, size)] if together else [(rank, 1) for rank in members]
        stacks += [Box((at, *logical), (n, *extent), local) for at, n in spans]
    return stacks


def _all_of(shares: Iterable[tuple[Counted, Iterable[int]]]) -> set[str]:
    """Parameters of which all elements are in one of these parts."""
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, dict[Box, None]] = {}
    for counted, numbers in shares:
        for part in map(counted.parts.__getitem__, numbers):
            shapes[part.name] = part.shape
            boxes.setdefault(part.name, {}).update(dict.fromkeys(part.boxes))
    return {name for name, shape in shapes.items() if coverage(shape, boxes[name]).least}


def _add(total: _Parts, more: _Parts, times: int) -> None:
    for key, count in more.items():
        total[key] += count * times


def _of(counted: Counted, statistic: Statistic) -> list[Counting]:
    return [counting for counting in counted.countings if counting.statistic is statistic]


def _in(counted: Counted, statistic: Statistic) -> list[int]:
    """The parts in any computation of a statistic."""
    return [term.number for counting in _of(counted, statistic) for term in _terms(counting)]


def _evaluations(counted: Counted, statistic: Statistic) -> list[list[Counting]]:
    """The computations of a statistic, apart where the same ones are made again.

    A norm may be computed once to be logged and once to clip by, then perhaps in other portions: no
    element is in either twice. An update or a reduction that is repeated is made twice.
    """
    countings = _of(counted, statistic)
    if statistic.is_local or not countings:
        return [countings] if countings else []
    made = [tuple((made.group, made.parts, made.sums) for made in c.made) for c in countings]
    content = [(c.parts, c.sums, *each) for c, each in zip(countings, made, strict=True)]
    size = next(
        size
        for size in range(1, len(countings) + 1)
        if len(countings) % size == 0 and content == content[:size] * (len(countings) // size)
    )
    if size < len(countings):
        return [countings[at : at + size] for at in range(0, len(countings), size)]
    held = [Counter((t.number, t.times) for t in _terms(counting)) for counting in countings]
    total = sum(held, Counter())
    # Each computation has all elements.
    for first in (it for it in itertools.accumulate(held[:-1]) if it.keys() == total.keys()):
        ends, so_far = [0], Counter[tuple[int, int]]()
        for number, more in enumerate(held, 1):
            so_far += more
            if so_far == first:
                ends.append(number)
                so_far = Counter()
        if first and not so_far:
            ends[-1] = len(held)
            return [countings[start:end] for start, end in itertools.pairwise(ends)]
    return [countings]


def _terms(counting: Counting) -> Iterator[Term]:
    """All parts in a computation."""
    yield from counting.parts
    for made in counting.made:
        yield from made.parts


def _names_in(reference: Counted | None, statistic: Statistic) -> frozenset[str] | None:
    """The parameters that the reference counts; ``None`` for all.

    The norm of gradients has all that the reference steps: one device has no copies to leave out.
    """
    if reference is None or not _of(reference, statistic):
        return None
    numbers = [*_in(reference, statistic)]
    if statistic is Statistic.GRAD_NORM:
        numbers += _in(reference, Statistic.STEPPED)
    return frozenset(reference.parts[number].name for number in numbers)


def _other_norms(reference: Counted | None, ranks: Mapping[int, Counted]) -> _Wrong:
    """Parameters that are not clipped by the norm of those that they are in the reference."""
    if reference is None:
        return {}
    trusted = _norms(reference)
    once = Coverage(1, 1)
    wrong: _Wrong = {}
    for rank, counted in ranks.items():
        theirs: dict[float, str] = {}
        ours: dict[float, str] = {}
        for name, value in _norms(counted).items():
            if name not in trusted:
                continue
            # The first parameter clipped by a norm stands for all others: both runs must agree.
            if theirs.setdefault(trusted[name], name) != ours.setdefault(value, name):
                wrong.setdefault((Cause.OTHER_NORM, name), _Miscount(once)).add(rank, once)
    return wrong


def _other_hyperparameters(
    trusted: Mapping[str, _Numbers], held: Mapping[int, Mapping[str, _Numbers]]
) -> dict[str, dict[tuple[str, float, float], list[int]]]:
    """Hyper-parameters that are not the reference's: by parameter, with both values, the ranks.

    Only those are compared that both optimizers have.
    """
    others: dict[str, dict[tuple[str, float, float], list[int]]] = {}
    for rank, parameters in held.items():
        for name, ours in parameters.items():
            theirs = trusted.get(module_of(name), {})
            for what, value in ours.items():
                right = theirs.get(what, value)
                if value != right and not (math.isnan(value) and math.isnan(right)):
                    others.setdefault(name, {}).setdefault((what, value, right), []).append(rank)
    return others


def _hyperparameters(counted: Counted, index: HyperparametersIndex) -> dict[str, _Numbers]:
    """Those of each parameter that is stepped, for this step or the next one."""
    is_next = index is HyperparametersIndex.NEXT
    return {
        counted.parts[term.number].name: dict(group.following if is_next else group.values)
        for group in counted.stepped
        for term in group.parts
        if group.following or not is_next
    }


def _norms(counted: Counted) -> dict[str, float]:
    return {
        counted.parts[term.number].name: counting.value
        for counting in _of(counted, Statistic.CLIPPED)
        for term in _terms(counting)
    }
