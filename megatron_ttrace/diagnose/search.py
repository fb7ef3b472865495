# SPDX-License-Identifier: Apache-2.0
"""Which repairs, one after another, make a failed tensor right: all compositions, by their size.

A *step* changes the values that the ranks hold, in each of the ways in which it applies (sum over
tp, divide by the size of cp, exchange two dims). A *closing* repair finds its own numbers in the
values that are left (a factor, an order of rows, shares that do not count). Every composition of up
to :data:`STEPS` steps and a closing repair is tested on every failing part.

The size of a composition is the number of its repairs and of the parameters that were fitted or
chosen: the smallest one is told. Longer compositions are searched only while they can be smaller
than what was found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

from megatron_ttrace.diagnose import (
    attention,
    position,
    region,
    replicas,
    scaling,
    shares,
    sources,
    summands,
)
from megatron_ttrace.diagnose.evidence import Evidence, ExhaustedError, Work
from megatron_ttrace.trace import findings as f
from megatron_ttrace.trace.findings import (
    Composed,
    ConstantFactor,
    Finding,
    ProductFactors,
    RankFactors,
)

Closing = Callable[[Evidence], Finding | None]
Step = Callable[[Evidence], Iterable[tuple[Finding, Evidence]]]
Failed = Callable[[str, Exception], None]

STEPS = 2
"""Steps before a closing repair."""

STEP: tuple[Step, ...] = (replicas.reduced, scaling.rescaled, position.transposed)
CLOSING: tuple[Closing, ...] = (
    scaling.zero,
    scaling.factor,
    scaling.shift,
    scaling.product,
    scaling.factor_per_rank,
    summands.entropy,
    summands.gradient,
    summands.addend,
    sources.elsewhere,
    position.rows,
    scaling.rounded,
    sources.operand,
    shares.weighted,
    attention.blocks,
    region.token_ids,
    region.dropped_rows,
    region.in_part,
)
"""Repairs of the same size are told in this order."""

_OF_UNCHANGED = (scaling.zero, region.in_part)
"""Says nothing about values that a step has made."""

WORK = 2e8
"""What one repair of a composition may compute, in elements."""

_CHOICE = 4.0
"""Bits of the choice of one step among all."""

_FACTORS = (ConstantFactor, RankFactors, ProductFactors)
_ALREADY_SCALED = (scaling.factor, scaling.factor_per_rank, scaling.product)
"""Nothing new after a step that divides by a size."""


def free(finding: Finding) -> int:
    """How many of a repair's parameters were fitted or chosen: the fewer, the stronger it is."""
    match finding:
        case f.Composed():
            return sum(map(free, finding.steps))
        case f.GradientFactor(ratio=0.0) | f.OtherTime(microbatch=None, iteration=None):
            return 0
        case f.ConstantFactor():
            return int(not finding.sizes and finding.cause is not f.Cause.SIGN)
        case f.ProductFactors(dtype=str(dtype)) if dtype:
            return 1
        case f.RankFactors():
            return len(finding.factors)
        case f.UnequalShares():
            said = (one for _, found in finding.by_ranks for one in found)
            return sum(1 if one.missing else len(one.counts) for one in said)
        case f.ReorderedRows(order=f.RowOrder.BLOCKS | f.RowOrder.REPEATED):
            return finding.blocks
        case f.Addend():
            return int(finding.surplus != round(finding.surplus))
        case f.BlockWeight():
            return 1 if finding.missing else 2
        case f.InPart():
            return 2 + free(finding.fault)
        case f.WrongRows():
            return 2
        case f.LossTerm(fault=fault):
            return 1 + free(fault)
        case f.PartialSums() | f.Shift() | f.Transposed():
            return 0
    return int(type(finding) is not f.Finding)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A composition that makes every failing part right."""

    steps: tuple[tuple[Step, Finding], ...]
    closing: Closing | None
    last: Finding | None

    @property
    def finding(self) -> Finding:
        """What it is, as one finding."""
        findings = [finding for _, finding in self.steps] + ([self.last] if self.last else [])
        if len(findings) == 1:
            return findings[0]
        axes = dict.fromkeys(axis for one in findings for axis in one.axes)
        return Composed(findings[0].cause, tuple(axes), steps=tuple(findings))

    @property
    def size(self) -> int:
        """Number of repairs and of free parameters."""
        return len(self.steps) + (self.last is not None) + free(self.finding)

    @property
    def order(self) -> tuple[int, int, int]:
        """What the simplest one is the smallest in."""
        return self.size, free(self.finding), CLOSING.index(self.closing) if self.closing else -1


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    evidence: Evidence
    steps: tuple[tuple[Step, Finding], ...] = ()

    @property
    def next_steps(self) -> tuple[Step, ...]:
        """Each step is taken at most once, in one order: the others give the same values."""
        return STEP[STEP.index(self.steps[-1][0]) + 1 :] if self.steps else STEP

    def closings(self) -> Iterator[Closing]:
        scaled = any(step is scaling.rescaled for step, _ in self.steps)
        for closing in CLOSING:
            if not (
                (self.steps and closing in _OF_UNCHANGED) or (scaled and closing in _ALREADY_SCALED)
            ):
                yield closing


def search(evidence: Evidence, failed: Failed | None = None) -> list[Found]:
    """Compositions that make every failing part right, the simplest first.

    Args:
        evidence: the failed tensor.
        failed: is told of a repair whose test raised; without it the exception is raised.
    """
    found: list[Found] = []
    states = [_State(evidence)] if evidence.parts else []
    try:
        for depth in range(STEPS + 1):
            best = min((one.size for one in found), default=depth + 2)
            if best > depth + 1 or not depth:
                for state in states:
                    found += _closed(state, failed)
            if depth == STEPS or min((one.size for one in found), default=depth + 2) <= depth + 1:
                break
            after: list[_State] = []
            for state in states:
                for new in _stepped(state, failed):
                    if new.evidence.is_right:
                        found.append(Found(new.steps, None, None))
                    else:
                        after.append(new)
            states = after
    except ExhaustedError:
        pass
    return sorted(found, key=lambda one: one.order)


def alternative(found: list[Found]) -> Finding | None:
    """Another repair than the first that is as simple, and is not the same in other words."""
    first = found[0].finding
    for other in found[1:]:
        alike = type(other.finding) is type(first)
        factors = isinstance(other.finding, _FACTORS) and isinstance(first, _FACTORS)
        if other.size <= found[0].size and not alike and not factors:
            return other.finding
    return None


def repeated(evidence: Evidence, known: Found) -> Finding | None:
    """The finding for another tensor that the same composition makes right."""
    for step, finding in known.steps:
        after = next((new for one, new in step(evidence) if one == finding), None)
        if after is None:
            return None
        evidence = after
    if known.closing is None or known.last is None:
        return known.finding if evidence.is_right else None
    last = known.closing(evidence)
    if last is None or (last.cause, last.axes) != (known.last.cause, known.last.axes):
        return None
    return Found(known.steps, known.closing, last).finding


def _closed(state: _State, failed: Failed | None) -> Iterator[Found]:
    for closing in state.closings():
        finding = _limited(closing.__name__, closing, state.evidence, failed)
        if finding is not None:
            yield Found(state.steps, closing, finding)


def _stepped(state: _State, failed: Failed | None) -> Iterator[_State]:
    before = state.evidence
    for step in state.next_steps:
        taken = _limited(step.__name__, functools.partial(_taken, step), before, failed)
        for finding, after in taken or ():
            evidence = dataclasses.replace(after, work=before.work, chosen=before.chosen + _CHOICE)
            yield _State(evidence, (*state.steps, (step, finding)))


def _taken(step: Step, evidence: Evidence) -> list[tuple[Finding, Evidence]]:
    return list(step(evidence))


def _limited[T](
    name: str, repair: Callable[[Evidence], T], evidence: Evidence, failed: Failed | None
) -> T | None:
    """What a repair finds with its share of the work; ``None`` if that is not enough."""
    try:
        return repair(dataclasses.replace(evidence, work=Work(WORK, evidence.work)))
    except ExhaustedError:
        if evidence.work.left < 0:
            raise
    except Exception as error:
        if failed is None:
            raise
        failed(name, error)
    return None
