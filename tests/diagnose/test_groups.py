# SPDX-License-Identifier: Apache-2.0
"""Culprits with one cause are one group, also where different ranks hold their tensors."""

from megatron_ttrace.diagnose.groups import Groups, group_of
from megatron_ttrace.trace.findings import (
    Cause,
    Finding,
    Grounds,
    PartialSums,
    ShareWeights,
    UnequalShares,
)
from megatron_ttrace.trace.records import Direction
from tests.diagnose.evidence_by_hand import WEIGHT, failed


def groups(*findings: Finding) -> list[int]:
    """The groups of different parameters with these findings."""
    known: Groups = {}
    return [
        group_of(
            *(known, Direction.GRADIENT),
            failed(WEIGHT.__class__(1, -1, WEIGHT.kind, f"module{number}.weight")),
            *(Grounds.MAIN_GRAD, finding),
        )
        for number, finding in enumerate(findings)
    ]


def shares(held: dict[tuple[int, ...], tuple[float, ...]], *, missing: bool) -> UnequalShares:
    """Of data-parallel ranks; what counts once is left out if others are missing."""
    return UnequalShares(
        Cause.WEIGHTS,
        by_ranks=tuple(
            (
                ranks,
                (
                    ShareWeights(
                        "module",
                        "dp",
                        tuple((n, c) for n, c in enumerate(counts) if not missing or c != 1),
                        missing,
                    ),
                ),
            )
            for ranks, counts in held.items()
        ),
    )


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
