# SPDX-License-Identifier: Apache-2.0
"""Culprits with one cause are one group, also where different ranks hold their tensors."""

from collections.abc import Callable

import pytest

from megatron_ttrace.diagnose.groups import Groups, group_of, looked_for_together
from megatron_ttrace.trace.findings import (
    Cause,
    Composed,
    ConstantFactor,
    Explanation,
    Finding,
    Loss,
    LossShare,
    OtherHyperparameters,
    PartialSums,
    ShareWeights,
    UnequalShares,
)
from megatron_ttrace.trace.outcomes import Grounds
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import Direction, Kind
from tests.diagnose.evidence_by_hand import WEIGHT, failed
from tests.diagnose.judged_by_hand import diagnosed


def groups(*findings: Finding, kind: Kind = WEIGHT.kind) -> list[int]:
    """The groups of different parameters with these findings."""
    known: Groups = {}
    return [
        group_of(
            *(known, Direction.GRADIENT),
            failed(WEIGHT.__class__(1, -1, kind, f"module{number}.weight")),
            *(Grounds.MAIN_GRAD, finding),
        )
        for number, finding in enumerate(findings)
    ]


def test_one_reduction_is_for_all_parameters() -> None:
    """Culprits without a cause are alike if they are looked for in the same functions."""
    here, there = ((Place("ddp.py", line, "f", Clue.RAN),) for line in (3, 4))
    known = Explanation(Finding(Cause.ZERO), here)
    explanations = Explanation(places=here), Explanation(places=there), known, Explanation()
    for direction, expected in (
        (Direction.UPDATE, [1, 2, 3, 4, 1, 2, 7, 8]),
        (Direction.FORWARD, [1, 2, 3, 4, 5, 6, 7, 8]),
    ):
        diagnoses = (
            diagnosed(failed(WEIGHT), why, direction=direction, group=number)
            for number, why in enumerate(explanations * 2, 1)
        )
        assert [one.group for one in looked_for_together(diagnoses)] == expected


def shares(held: dict[tuple[int, ...], tuple[float, ...]], *, missing: bool) -> UnequalShares:
    """Of data-parallel ranks; what counts once is left out if others are missing."""
    by_ranks = []
    for ranks, counts in held.items():
        odd = tuple((n, count) for n, count in enumerate(counts) if not missing or count != 1)
        by_ranks.append((ranks, (ShareWeights("module", "dp", odd, missing),)))
    return UnequalShares(Cause.WEIGHTS, by_ranks=tuple(by_ranks))


def test_a_parameter_in_another_group() -> None:
    """Some have more that is wrong: one cause, if any number is wrong alike."""
    rate, decay, other = ("lr", 2.0, 1.0), ("weight_decay", 0.1, 0.0), ("lr", 3.0, 1.0)
    values = (rate, decay), (rate,), (other,)
    findings = (OtherHyperparameters(Cause.HYPERPARAMETERS, values=each) for each in values)
    assert groups(*findings, kind=Kind.HYPERPARAMETERS) == [1, 1, 2]


@pytest.mark.parametrize(
    ("ratios", "expected"), [((1.5, 1.5049, 1.497), [1, 1, 1]), ((1.5, 1.6, 1.7), [1, 2, 3])]
)
def test_equal_factors_are_one_cause(ratios: tuple[float, ...], expected: list[int]) -> None:
    """Also if they are not a size of the layout, whatever their last digits are."""
    assert groups(*(ConstantFactor(Cause.TOO_SMALL, ratio=ratio) for ratio in ratios)) == expected


@pytest.mark.parametrize(
    ("cause", "expected"), [(Cause.RANDOM_STATE, [1, 1]), (Cause.INITIAL_VALUES, [1, 2])]
)
def test_one_seed_is_for_all_parameters(cause: Cause, expected: list[int]) -> None:
    """What else makes initial values is each module's own."""
    assert groups(Finding(cause), Finding(cause), kind=Kind.INITIAL) == expected


@pytest.mark.parametrize(
    "wrap",
    [
        lambda size: size,
        lambda size: Composed(size.cause, steps=(PartialSums(Cause.PARTIAL, ("dp",)), size)),
        lambda size: LossShare(size.cause, losses=(Loss.Z,), fault=size),
    ],
)
def test_a_size_without_its_digits(wrap: Callable[[ConstantFactor], Finding]) -> None:
    """A factor that is a size of the layout is the same, however it was measured."""
    sizes = (("tp",),)
    factors = [ConstantFactor(Cause.TOO_LARGE, ratio=r, sizes=sizes) for r in (2.0, 2.1)]
    assert groups(*map(wrap, factors)) == [1, 1]


def test_one_fault_of_shards() -> None:
    """Each rank holds four times its own half; which ranks hold a tensor does not matter."""
    first = shares({(0,): (4.0, 4.0, 0.0, -0.0), (2,): (0.0, 0.0, 4.0, 4.0)}, missing=False)
    second = shares({(3,): (0.0, -0.0, 4.001, 4.0)}, missing=False)
    other = shares({(3,): (0.0, 0.0, 2.0, 2.0)}, missing=False)
    assert groups(first, second, other) == [1, 1, 2]


def test_partial_sums_in_other_words() -> None:
    """Each half of the ranks lacks the shares of the other half."""
    partial = PartialSums(Cause.PARTIAL, ("dp",))
    halves = shares({(0, 1): (1, 1, 0, 0), (2, 3): (0, 0, 1, 1)}, missing=True)
    one_lost = shares({(0, 1): (1, 1, 0, 1), (2, 3): (1, 1, 0, 1)}, missing=True)
    assert groups(partial, halves, one_lost) == [1, 1, 2]
