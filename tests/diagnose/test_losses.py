# SPDX-License-Identifier: Apache-2.0
"""Faults of one loss's share of a gradient, told apart from faults of the whole gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.diagnose.losses import Share, miscounted
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
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
from tests.diagnose.evidence_by_hand import evidence_of, hint, meshes, text, values

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
    held: Callable[[int], dict[Loss, float]],
    *,
    known: list[Share] | None = None,
    noise: float = 1e-6,
    tolerance: float = 1e-4,
    **axes: int,
) -> LossShare | None:
    """What is found if rank ``r`` counts its losses' shares ``held(r)`` times, where not once."""
    ranks = meshes(math.prod(axes.values()), **axes)

    def local(rank: int, right: torch.Tensor) -> torch.Tensor:
        wrong = sum((times - 1) * SHARES[loss] for loss, times in held(rank).items())
        return right + wrong + noise * values(24, 16, seed=50 + rank)

    evidence = evidence_of(WHOLE, ranks, local, key=ROUTER, tolerance=tolerance, microbatches=3)
    return miscounted(evidence, shares() if known is None else known)


def test_too_large() -> None:
    """The size that it is off by is named."""
    it = found(lambda rank: {Loss.AUXILIARY: 2.0}, cp=2)
    assert it is not None
    assert (it.losses, it.cause, it.axes) == ((Loss.AUXILIARY,), Cause.TOO_LARGE, ("cp",))
    assert text(it) == (
        "the auxiliary loss's share of the gradient is 2.000 times too large = the size of cp"
    )
    assert hint(it) == "a missing division or a doubled reduction over cp"


def test_microbatches() -> None:
    """Losses that are off alike are named together."""
    it = found(lambda rank: {Loss.AUXILIARY: 1 / 3, Loss.Z: 1 / 3}, tp=2)
    assert text(it) == (
        "the auxiliary loss's and the z loss's shares of the gradient are 3.000 times too small = "
        "the number of microbatches"
    )


def test_lost() -> None:
    """On the ranks that fail."""
    it = found(lambda rank: {Loss.Z: float(rank == 0)}, tp=2)
    assert it == LossShare(Cause.ZERO, losses=(Loss.Z,), fault=Finding(Cause.ZERO))
    assert text(it) == "the z loss's share of the gradient is missing"


def test_nothing_but_zeros() -> None:
    """All of the gradient but another loss's share, which is zero there, is lost on one rank."""
    only = torch.zeros(24, 16)
    only[:12] = 1.0
    other = 1.0 - only
    known = [Share(Loss.Z, True, only), Share(Loss.MTP, True, other)]
    evidence = evidence_of(
        only + other, meshes(2, tp=2), lambda rank, right: right - only * (rank == 0), key=ROUTER
    )
    it = miscounted(evidence, known)
    assert it == LossShare(Cause.ZERO, losses=(Loss.Z,), fault=Finding(Cause.ZERO))


def test_the_main_loss() -> None:
    """Its share is what the others leave."""
    it = found(lambda rank: {Loss.MAIN: 2.0}, tp=2)
    assert it is not None
    assert it.losses == (Loss.MAIN,)
    assert it.axes == ("tp",)


def test_partial_sums() -> None:
    """Each rank has a part of the share, and all of the rest."""
    it = found(lambda rank: {Loss.MTP: (0.3, 0.7)[rank]}, tp=2)
    assert it is not None
    assert it.fault == PartialSums(Cause.PARTIAL, ("tp",))
    assert text(it) == (
        "the MTP loss's share of the gradient: partial sums over tp: their sum is the reference"
    )


def test_a_factor_that_is_no_size() -> None:
    """It is fitted."""
    it = found(lambda rank: {Loss.Z: 7.3}, tp=2)
    assert it is not None
    assert isinstance(it.fault, ConstantFactor)
    assert it.fault.ratio == pytest.approx(7.3, rel=1e-3)
    assert not it.fault.sizes


def test_a_factor_of_each_rank() -> None:
    """Only if no common one fits."""
    it = found(lambda rank: {Loss.Z: (5.0, 7.3)[rank]}, tp=2)
    assert it is not None
    assert isinstance(it.fault, RankFactors)


def test_a_shard() -> None:
    """Each rank's part is compared with its part of the share."""
    evidence = evidence_of(
        WHOLE,
        meshes(2, tp=2),
        lambda rank, right: right + SHARES[Loss.AUXILIARY].chunk(2)[rank],
        placement=(Step("tp", Shard(0)),),
        key=ROUTER,
    )
    it = miscounted(evidence, shares())
    assert it is not None
    assert (it.losses, it.cause) == ((Loss.AUXILIARY,), Cause.TOO_LARGE)


def test_only_its_own() -> None:
    """Of a module below others, what it adds itself may be all that is wrong."""
    both = [Share(Loss.AUXILIARY, False, values(24, 16, seed=9)), *shares(own=True)]
    it = found(lambda rank: {Loss.AUXILIARY: 0.0}, tp=2, known=both)
    assert it is not None
    assert it.losses == (Loss.AUXILIARY,)


def test_noise_is_no_share() -> None:
    """Nor is an error that is only in part along a share."""
    assert found(lambda rank: {}, noise=0.01, tp=2) is None
    assert found(lambda rank: {Loss.Z: 2.0}, noise=0.01, tp=2) is None


def test_a_wide_tolerance() -> None:
    """One of two losses that are off alike is enough for it; the fault is told of both."""
    both = dict.fromkeys((Loss.AUXILIARY, Loss.MTP), 2.0)
    it = found(lambda rank: both, tolerance=0.008, tp=2)
    assert it is not None
    assert it.losses == (Loss.AUXILIARY, Loss.MTP)


def test_a_share_of_another_shape() -> None:
    """It is left out; nothing is found."""
    strange = [Share(Loss.Z, False, torch.ones(3)), Share(Loss.AUXILIARY, False, 0 * WHOLE)]
    assert found(lambda rank: {Loss.Z: 0.0}, tp=2, known=strange) is None


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
    it = found(
        lambda rank: dict.fromkeys(losses, times),
        noise=tolerance / 20,
        tolerance=tolerance,
        tp=tp,
        cp=cp,
    )
    assert it is not None
    assert set(it.losses) == set(losses)
    if not power:
        assert it.fault == Finding(Cause.ZERO)
        return
    assert isinstance(it.fault, ConstantFactor)
    assert it.fault.ratio == times
    assert ("tp",) in it.fault.sizes if tp == size else ("cp",) in it.fault.sizes
