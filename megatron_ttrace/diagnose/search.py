# SPDX-License-Identifier: Apache-2.0
"""Which repairs, one after another, make a failed tensor right: all compositions, by their size.

A *step* changes the values that the ranks hold, in each of the ways in which it applies (sum over
tp, divide by the size of cp, exchange two dims). A *closing* repair finds its own numbers in the
values that are left (a factor, an order of rows, shares that do not count). Every composition of up
to :data:`STEPS` steps and a closing repair is tested on every failing part.

The size of a composition is the number of its repairs and of the parameters that were fitted or
chosen: the smallest one is reported. Longer ones are searched only while they can be smaller than
what was found.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from megatron_ttrace.diagnose.evidence import CHANCE, Evidence, ExhaustedError, Work
from megatron_ttrace.trace import findings as f
from megatron_ttrace.trace.findings import Finding
from megatron_ttrace.trace.records import Kind

Closing = Callable[[Evidence], Finding | None]
Step = Callable[[Evidence], Iterable[tuple[Finding, Evidence]]]
Steps = tuple[tuple[Step, Finding], ...]
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
    replicas.parts_summed,
    position.rows,
    scaling.rounded,
    sources.operand,
    shares.weighted,
    attention.blocks,
    region.token_ids,
    region.other_samples,
    region.scaled_rows,
    region.in_part,
)
"""Of repairs of the same size the first is reported."""

_OF_UNCHANGED = (scaling.zero, region.in_part)
"""Says nothing about values that a step has made."""

WORK = 2e8
"""What one repair of a composition may compute, in elements."""

_CHOICE = 4.0
"""Bits of the choice of one step among all."""

_FACTORS = (f.ConstantFactor, f.RankFactors, f.ProductFactors)
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
            weights = (weight for _, weights in finding.by_ranks for weight in weights)
            return sum(1 if weight.missing else len(weight.counts) for weight in weights)
        case f.ReorderedRows(order=f.RowOrder.BLOCKS | f.RowOrder.REPEATED):
            return finding.blocks
        case f.Addend():
            return int(finding.surplus != round(finding.surplus))
        case f.BlockWeight():
            return 1 if finding.missing else 2
        case f.InPart():
            return 2 + free(finding.fault)
        case f.WrongRows(fault=fault):
            return 2 + (free(fault) if fault else 0)
        case f.LossTerm(fault=fault):
            return 1 + free(fault)
        case f.PartialSums() | f.Shift() | f.Transposed():
            return 0
    return int(type(finding) is not f.Finding)


@dataclasses.dataclass(frozen=True, slots=True)
class Composition:
    """Repairs that make every failing part right, one after another."""

    steps: Steps
    closing: Closing | None = None
    last: Finding | None = None

    @property
    def finding(self) -> Finding:
        """What it is, as one finding."""
        findings = [finding for _, finding in self.steps] + ([self.last] if self.last else [])
        if len(findings) == 1:
            return findings[0]
        axes = dict.fromkeys(axis for finding in findings for axis in finding.axes)
        return f.Composed(findings[0].cause, tuple(axes), steps=tuple(findings))

    @property
    def size(self) -> int:
        """Number of repairs and of free parameters."""
        return len(self.steps) + (self.last is not None) + free(self.finding)

    @property
    def order(self) -> tuple[int, int, int]:
        """What the simplest one is the smallest in."""
        return self.size, free(self.finding), CLOSING.index(self.closing) if self.closing else -1


def search(evidence: Evidence, failed: Failed | None = None) -> list[Composition]:
    """Compositions that make every failing part right, the simplest first.

    ``failed`` is called with a repair whose test raised; without it the exception is raised.
    """
    compositions: list[Composition] = []
    # A few integers are another sample's, or zero, by chance.
    is_few = evidence.key.kind is Kind.TOKENS and evidence.reference.numel() < CHANCE
    is_known = evidence.parts and not is_few
    states: list[tuple[Evidence, Steps]] = [(evidence, ())] if is_known else []

    def is_settled(depth: int) -> bool:
        return any(composition.size <= depth + 1 for composition in compositions)

    with contextlib.suppress(ExhaustedError):
        for depth in range(STEPS + 1):
            if not depth or not is_settled(depth):
                for before, steps in states:
                    compositions += _closed(before, steps, failed)
            if depth == STEPS or is_settled(depth):
                break
            stepped = (new for before, steps in states for new in _stepped(before, steps, failed))
            states = []
            for after, steps in stepped:
                if after.is_right:
                    compositions.append(Composition(steps))
                else:
                    states.append((after, steps))
    if any(type(composition.finding) is f.RankFactors for composition in compositions):
        # A sum of multiples of the reference is a multiple, too: its factor proves no sum.
        compositions = [c for c in compositions if not _is_scaled_sum(c.finding)]
    return sorted(compositions, key=lambda composition: composition.order)


def _is_scaled_sum(finding: Finding) -> bool:
    steps = finding.steps if isinstance(finding, f.Composed) else ()
    return {type(step) for step in steps} == {f.PartialSums, f.ConstantFactor}


def alternative(compositions: list[Composition]) -> Finding | None:
    """A second repair that is as simple as the first, and not the same in other words."""
    first = compositions[0].finding
    for other in compositions[1:]:
        alike = type(other.finding) is type(first)
        factors = isinstance(other.finding, _FACTORS) and isinstance(first, _FACTORS)
        if other.size <= compositions[0].size and not alike and not factors:
            return other.finding
    return None


def repeated(evidence: Evidence, known: Composition) -> Finding | None:
    """The finding for another tensor that the same composition makes right."""
    for step, finding in known.steps:
        after = next((new for other, new in step(evidence) if other == finding), None)
        if after is None:
            return None
        evidence = after
    if known.closing is None or known.last is None:
        return known.finding if evidence.is_right else None
    last = known.closing(evidence)
    if last is None or (last.cause, last.axes) != (known.last.cause, known.last.axes):
        return None
    return dataclasses.replace(known, last=last).finding


def _closed(before: Evidence, steps: Steps, failed: Failed | None) -> Iterator[Composition]:
    scaled = any(step is scaling.rescaled for step, _ in steps)
    useless = (*(_OF_UNCHANGED if steps else ()), *(_ALREADY_SCALED if scaled else ()))
    for closing in (closing for closing in CLOSING if closing not in useless):
        finding = None
        with _limited(closing.__name__, before, failed) as evidence:
            finding = closing(evidence)
        if finding is not None:
            yield Composition(steps, closing, finding)


def _stepped(
    before: Evidence, steps: Steps, failed: Failed | None
) -> Iterator[tuple[Evidence, Steps]]:
    # Each step is taken at most once, in one order: the others give the same values.
    for step in STEP[STEP.index(steps[-1][0]) + 1 :] if steps else STEP:
        taken: list[tuple[Finding, Evidence]] = []
        with _limited(step.__name__, before, failed) as evidence:
            taken = list(step(evidence))
        for finding, after in taken:
            after = dataclasses.replace(after, work=before.work, chosen=before.chosen + _CHOICE)
            yield after, (*steps, (step, finding))


@contextlib.contextmanager
def _limited(name: str, evidence: Evidence, failed: Failed | None) -> Iterator[Evidence]:
    """The evidence with a repair's share of the work, which may be too little for the repair."""
    try:
        yield dataclasses.replace(evidence, work=Work(WORK, evidence.work))
    except ExhaustedError:
        if evidence.work.left < 0:
            raise
    except Exception as error:
        if failed is None:
            raise
        failed(name, error)
