# SPDX-License-Identifier: Apache-2.0
"""Faults of one loss's share of a gradient, distinguished from faults of the whole gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.diagnose.losses import miscounted
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.captured import Share
from megatron_ttrace.trace.findings import (
    Cause,
    ConstantFactor,
    Finding,
    Loss,
    LossShare,
    PartialSums,
    RankFactors,
)
from megatron_ttrace.trace.records import Kind, TraceKey
from tests.diagnose.evidence_by_hand import evidence_of, explain, hint, meshes, text, values

ROUTER = TraceKey(1, 0, Kind.GRAD_INPUT, "decoder.layers.1.mlp.router", 0)
OTHERS = (Loss.AUXILIARY, Loss.Z, Loss.MTP)
MAIN = values(24, 16)
SHARES = {Loss.MAIN: MAIN} | {
    loss: scale * values(24, 16, seed=1 + number)
    for number, (loss, scale) in enumerate(zip(OTHERS, (0.02, 0.02, 0.006), strict=True))
}
WHOLE = sum(SHARES.values(), torch.zeros(()))


def shares(*, own: bool = False) -> list[Share]:
    return [Share(loss, own, SHARES[loss]) for loss in OTHERS]


def found(
    counts: dict[Loss, float] | Callable[[int], dict[Loss, float]],
    *,
    known: list[Share] | None = None,
    noise: float = 1e-6,
    tolerance: float = 1e-4,
    **axes: int,
) -> LossShare | None:
    """What is found if (each rank's) losses' shares are counted so often, where not once."""
    ranks = meshes(math.prod(axes.values()), **axes)

    def local(rank: int, right: torch.Tensor) -> torch.Tensor:
        of_rank = counts(rank) if callable(counts) else counts
        wrong = sum((times - 1) * SHARES[loss] for loss, times in of_rank.items())
        return right + wrong + noise * values(24, 16, seed=50 + rank)

    evidence = evidence_of(WHOLE, ranks, local, key=ROUTER, tolerance=tolerance, microbatches=3)
    return miscounted(evidence, shares() if known is None else known)


A, Z, MTP, MAIN_LOSS = Loss.AUXILIARY, Loss.Z, Loss.MTP, Loss.MAIN
Counts = dict[Loss, float] | Callable[[int], dict[Loss, float]]
FAULTS: list[tuple[dict[str, int], Counts, tuple[Loss, ...], Finding, str]] = [
    (
        *({"cp": 2}, {A: 2.0}, (A,)),
        ConstantFactor(Cause.TOO_LARGE, ("cp",), ratio=2.0, sizes=(("cp",),)),
        "the auxiliary loss's share of the gradient is 2.000 times too large = the size of cp",
    ),
    # Losses that are off alike are named together.
    (
        *({"tp": 2}, {A: 1 / 3, Z: 1 / 3}, (A, Z)),
        ConstantFactor(Cause.TOO_SMALL, ("microbatches",), ratio=1 / 3, sizes=(("microbatches",),)),
        "the auxiliary loss's and the z loss's shares of the gradient are 3.000 times too small = "
        "the number of microbatches",
    ),
    # On the rank that fails.
    (
        *({"tp": 2}, lambda rank: {Z: float(rank == 0)}, (Z,), Finding(Cause.ZERO)),
        "the z loss's share of the gradient is missing",
    ),
    # The share of the main loss is what the others leave.
    (
        *({"tp": 2}, {MAIN_LOSS: 2.0}, (MAIN_LOSS,)),
        ConstantFactor(Cause.TOO_LARGE, ("tp",), ratio=2.0, sizes=(("tp",),)),
        "2.000 times too large = the size of tp",
    ),
    # Each rank has a part of the share, and all of the rest.
    (
        *({"tp": 2}, lambda rank: {MTP: (0.3, 0.7)[rank]}, (MTP,)),
        PartialSums(Cause.PARTIAL, ("tp",)),
        "the MTP loss's share of the gradient: partial sums over tp: their sum is the reference",
    ),
]


@pytest.mark.parametrize(("axes", "counts", "losses", "fault", "words"), FAULTS)
def test_faults(
    axes: dict[str, int], counts: Counts, losses: tuple[Loss, ...], fault: Finding, words: str
) -> None:
    """Of one loss's share, or of several losses' alike."""
    it = found(counts, **axes)
    assert it == LossShare(fault.cause, fault.axes, losses=losses, fault=fault)
    assert text(it).endswith(words)


@pytest.mark.parametrize(("cp", "axes"), [(1, ("microbatches",)), (2, ())])
def test_both_runs_have_as_many_microbatches(cp: int, axes: tuple[str, ...]) -> None:
    """Where no data parallelism or pipeline schedules them, their number is no cause."""
    key = TraceKey(1, 0, Kind.GRAD_OUTPUT, "model", 0)
    held = dict.fromkeys(range(2), 4 * WHOLE)
    finding = explain(evidence_of(WHOLE, meshes(2, cp=cp), held, key=key, microbatches=4))
    assert finding is not None
    assert finding.axes == axes


def test_a_hint_is_that_of_the_fault() -> None:
    given = hint(found({A: 2.0}, cp=2))
    assert given == "a missing division, or a doubled factor or reduction over cp"


@pytest.mark.parametrize("counts", [(7.3, 7.3), (5.0, 7.3)], ids=["common", "per rank"])
def test_a_factor_that_is_no_size(counts: tuple[float, ...]) -> None:
    """It is fitted; one for each rank only if no common one fits."""
    it = found(lambda rank: {Z: counts[rank]}, tp=2)
    assert it is not None
    if isinstance(it.fault, ConstantFactor):
        assert it.fault.ratio == pytest.approx(7.3, rel=1e-3)
        assert not it.fault.sizes
    assert isinstance(it.fault, ConstantFactor if len(set(counts)) == 1 else RankFactors)


def test_nothing_but_zeros() -> None:
    """All of the gradient but another loss's share, which is zero there, is lost on one rank."""
    only = torch.zeros(24, 16)
    only[:12] = 1.0
    known = [Share(Z, True, only), Share(MTP, True, 1.0 - only)]
    held = {0: 1.0 - only, 1: torch.ones(24, 16)}
    it = miscounted(evidence_of(torch.ones(24, 16), meshes(2, tp=2), held, key=ROUTER), known)
    assert it == LossShare(Cause.ZERO, losses=(Z,), fault=Finding(Cause.ZERO))


def test_a_shard() -> None:
    """Each rank's part is compared with its part of the share."""
    halves = zip(WHOLE.chunk(2), SHARES[A].chunk(2), strict=True)
    held = {rank: right + share for rank, (right, share) in enumerate(halves)}
    place = (Step("tp", Shard(0)),)
    it = miscounted(
        evidence_of(WHOLE, meshes(2, tp=2), held, placement=place, key=ROUTER), shares()
    )
    assert it is not None
    assert (it.losses, it.cause) == ((A,), Cause.TOO_LARGE)


def test_only_its_own() -> None:
    """Of a module below others, what it adds itself may be all that is wrong."""
    both = [Share(A, False, values(24, 16, seed=9)), *shares(own=True)]
    it = found({A: 0.0}, tp=2, known=both)
    assert it is not None
    assert it.losses == (A,)


def test_a_wide_tolerance() -> None:
    """One of two losses that are off alike is enough for it; the fault is that of both."""
    it = found({A: 2.0, MTP: 2.0}, tolerance=0.008, tp=2)
    assert it is not None
    assert it.losses == (A, MTP)


STRANGE = [Share(Z, False, torch.ones(3)), Share(A, False, 0 * WHOLE)]


@pytest.mark.parametrize(
    ("counts", "noise", "known"),
    [({}, 0.01, None), ({Z: 2.0}, 0.01, None), ({Z: 0.0}, 1e-6, STRANGE)],
    ids=["noise", "in part along a share", "shares of another shape, or zero"],
)
def test_no_fault(counts: dict[Loss, float], noise: float, known: list[Share] | None) -> None:
    assert found(counts, noise=noise, known=known, tp=2) is None


@settings(max_examples=40, deadline=None)
@given(
    losses=st.lists(st.sampled_from([Loss.MAIN, *OTHERS]), min_size=1, max_size=2, unique=True),
    axes=st.sampled_from([(2, 1), (1, 2), (2, 3), (4, 1)]),
    power=st.sampled_from([-1, 0, 1]),
    tolerance=st.sampled_from([1e-4, 1e-3]),
)
def test_planted(losses: list[Loss], axes: tuple[int, int], power: int, tolerance: float) -> None:
    """A share that is lost, or off by a size of the layout, is found again with its losses."""
    tp, cp = axes
    size = max(tp, cp)
    times = float(size) ** power if power else 0.0
    counts = dict.fromkeys(losses, times)
    it = found(counts, noise=tolerance / 20, tolerance=tolerance, tp=tp, cp=cp)
    assert it is not None
    assert set(it.losses) == set(losses)
    if not power:
        assert it.fault == Finding(Cause.ZERO)
        return
    assert isinstance(it.fault, ConstantFactor)
    assert it.fault.ratio == times
    assert ("tp",) in it.fault.sizes if tp == size else ("cp",) in it.fault.sizes
