# SPDX-License-Identifier: Apache-2.0
"""Histogram, worst elements and slices of a failed tensor."""

import dataclasses
import math

import pytest
import torch

from megatron_ttrace.diagnose import residual
from megatron_ttrace.diagnose.residual import HIGHEST, LOWEST, residuals
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import Kind, Outcome, Residual, TraceKey
from tests.diagnose.evidence_by_hand import evidence_of, explain, meshes, values
from tests.diagnose.judged_by_hand import judged
from tests.report.synthetic_report import culprit_of

REFERENCE = values(8, 4)
RMS = float(REFERENCE.square().mean().sqrt())


def wrong_on_rank_1(rank: int, right: torch.Tensor) -> torch.Tensor:
    """Rank 1 holds rows 4 to 7; two of its elements are off by 3 and 0.05."""
    held = right.clone()
    if rank == 1:
        held[2, 3] += 3.0
        held[0, 1] -= 0.05
    return held


def test_indices_are_those_of_the_whole_tensor() -> None:
    """A rank's third row is row 6 of the logical tensor."""
    evidence = evidence_of(
        REFERENCE, meshes(2, tp=2), wrong_on_rank_1, placement=(Step("tp", Shard(0)),)
    )
    details = residual.residual(evidence)
    first, second = details.worst[:2]
    assert (first.index, first.rank) == ((6, 3), 1)
    assert first.candidate - first.reference == pytest.approx(3.0, rel=1e-5)
    assert second.index == (4, 1)
    assert details.boxes == ((1, "[4:8, 0:4]"),)
    assert (details.total, details.exact) == (16, 14)
    decades = {LOWEST + at: n for at, n in enumerate(details.counts) if n}
    assert decades == {math.floor(math.log10(e / RMS)): 1 for e in (3.0, 0.05)}
    assert Residual.from_json(details.to_json()) == details


MASKED = REFERENCE.clone()
MASKED[0], MASKED[1, 0] = -math.inf, math.nan


def test_what_a_mask_hides_in_both_runs_is_no_error() -> None:
    """Equal infinities, and NaN in both, are exact; the rest is explained as without them."""
    evidence = evidence_of(MASKED, meshes(2, tp=2), lambda _, right: right * 2)
    details = residual.residual(evidence)
    assert (details.total, details.exact) == (2 * 32, 2 * 5)
    assert all(math.isfinite(element.reference) for element in details.worst)
    finding = explain(evidence)
    assert finding is not None
    assert finding.cause is Cause.TOO_LARGE


def test_another_infinity_is_the_worst_error() -> None:
    """Also where one rank of two has it, and where it stands for a number."""
    other, number = MASKED.clone(), MASKED.clone()
    other[0, 1], number[5, 2] = math.inf, -math.inf
    worst = residual.residual(evidence_of(MASKED, meshes(2, tp=2), {0: other, 1: number})).worst
    assert {(0, 1), (5, 2)} <= {element.index for element in worst}
    first = next(element for element in worst if element.index == (0, 1))
    assert (first.reference, first.candidate) == (-math.inf, math.inf)


def test_replicas_stand_side_by_side() -> None:
    """The worst elements of a rank, with the other rank's values."""
    held = {0: REFERENCE + 1e-3, 1: REFERENCE + 1e-3}
    held[1][5, 2] += 2.0
    details = residual.residual(evidence_of(REFERENCE, meshes(2, tp=2), held))
    first, second = details.worst[:2]
    assert (first.index, first.rank, second.index, second.rank) == ((5, 2), 0, (5, 2), 1)
    assert first.reference == second.reference
    assert second.candidate - first.candidate == pytest.approx(2.0, rel=1e-5)
    assert len({element.index for element in details.worst}) <= residual.WORST


def test_what_is_no_number_is_worst() -> None:
    """NaN and infinity stand in the last decade and first among the worst."""
    held = REFERENCE.clone()
    held[3, 2] = math.nan
    held[1, 1] = math.inf
    held[0, 0] += 1e-12
    details = residual.residual(evidence_of(REFERENCE, meshes(1), {0: held}))
    assert {element.index for element in details.worst[:2]} == {(3, 2), (1, 1)}
    assert details.counts[HIGHEST - LOWEST] == 2
    again = Residual.from_json(details.to_json())
    assert math.isnan(next(element for element in again.worst if element.index == (3, 2)).candidate)


def verdict(name: str, margin: float, microbatch: int = 0) -> Judged:
    """A tensor that diverged."""
    return judged(Kind.OUTPUT, name, Outcome.DIVERGED, microbatch=microbatch, margin=margin)


def test_the_worst_of_each_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of culprits always, then one a name and kind, the worst first, up to a limit."""
    asked: list[TraceKey] = []
    monkeypatch.setattr(residual, "MOST", 3)
    verdicts = [verdict("a", 2), verdict("a", 9, 1), verdict("b.weight", 5), verdict("c", 7)]
    (shown,) = [culprit_of(verdicts[2], "", "")]
    culprit = dataclasses.replace(shown, name="b")
    assert residuals(verdicts, [culprit], asked.append) == ()
    assert asked == [verdicts[2].key, verdicts[1].key, verdicts[3].key]
    # The elements of the tensor that the report names, though another microbatch is worse.
    asked.clear()
    assert residuals(verdicts[:2], [culprit_of(verdicts[0], "", "")], asked.append) == ()
    assert asked == [verdicts[0].key, verdicts[1].key]


def test_the_budget_counts_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is begun after the budget is spent, however fast the machine is."""
    held = {0: REFERENCE + 1.0}
    monkeypatch.setattr(residual, "ELEMENTS", 2 * REFERENCE.numel())
    verdicts = [verdict(name, 2) for name in ("a", "b", "c")]
    details = residuals(verdicts, [], lambda key: evidence_of(REFERENCE, meshes(1), held))
    assert len(details) == 2


def test_it_never_raises() -> None:
    """Details are left out when what was kept cannot be read."""

    def broken(key: TraceKey) -> None:
        raise OSError(key)

    assert residuals([verdict("a", 2)], [], broken) == ()
