# SPDX-License-Identifier: Apache-2.0
"""Causes that other verdicts contradict are not reported."""

import dataclasses
import math

import pytest

from megatron_ttrace.compare.tolerance import Tolerance
from megatron_ttrace.diagnose.control import controlled
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import (
    Cause,
    ConstantFactor,
    Explanation,
    Finding,
    Miscounted,
    OtherHyperparameters,
    PartialSums,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, TraceKey
from tests.diagnose.judged_by_hand import judged

NAMES = ("a.weight", "b.weight")
STRANGE = "c.weight"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tolerances of a reference whose tensors all have one size, but the gradient norm."""

    norm: float = 1.0

    def of(self, key: TraceKey) -> Tolerance:
        """One for all that the reference has."""
        if key.name == STRANGE:
            raise KeyError(key)
        return Tolerance(1e-3, self.norm if key.kind is Kind.GRAD_NORM else 1.0)


def verdict(
    kind: Kind, name: str, outcome: Outcome = Outcome.PASS, microbatch: int = STEP_LEVEL
) -> Judged:
    """Far off if it fails."""
    margin = 0.1 if outcome is Outcome.PASS else 1000.0
    return judged(kind, name, outcome, microbatch=microbatch, margin=margin, tolerance=1e-3)


def cause(finding: Finding, failed: Judged, *others: Judged, norm: float = 1.0) -> Cause | None:
    """The cause that is left of a failure, with the verdicts after it."""
    explain = controlled(lambda _: Explanation(finding), [failed, *others], Sizes(norm))  # type: ignore[arg-type]
    left = explain(failed).finding
    return left.cause if left else None


BAD = Outcome.DIVERGED


@pytest.mark.parametrize(
    ("kind", "user"),
    [
        (Kind.OUTPUT, Kind.INPUT),
        (Kind.OUTPUT, Kind.LOSS),
        (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT),
        (Kind.GRAD_INPUT, Kind.MAIN_GRAD),
    ],
)
def test_what_uses_an_activation(kind: Kind, user: Kind) -> None:
    """A tensor whose users pass is not partial for them."""
    failed = verdict(kind, "linear", BAD, 0)
    at = 0 if user not in (Kind.LOSS, Kind.MAIN_GRAD) else STEP_LEVEL
    partial = PartialSums(Cause.PARTIAL, ("tp",))
    assert cause(partial, failed) is Cause.PARTIAL
    assert cause(partial, failed, verdict(user, "next", microbatch=at)) is None
    assert cause(partial, failed, verdict(user, "next", BAD, at)) is Cause.PARTIAL
    other = verdict(user, "next", microbatch=1)
    assert cause(partial, failed, other) is Cause.PARTIAL
    near = dataclasses.replace(failed, margin=2.0)
    assert cause(partial, near, verdict(user, "next", microbatch=at)) is Cause.PARTIAL


@pytest.mark.parametrize("user", [Kind.GRAD_NORM, Kind.EXP_AVG, Kind.PARAM_DELTA])
def test_what_uses_a_gradient(user: Kind) -> None:
    """A gradient with which the norm, the moments and the update are right is not too large."""
    failed = verdict(Kind.MAIN_GRAD, NAMES[0], BAD)
    factor = ConstantFactor(Cause.TOO_LARGE, ratio=2.0)
    assert cause(factor, failed, verdict(user, NAMES[0])) is None
    assert cause(factor, failed, verdict(user, NAMES[0], BAD)) is Cause.TOO_LARGE


@pytest.mark.parametrize(("size", "left"), [(2, None), (10_000_000, Cause.COUNTED_TWICE)])
def test_a_norm_that_passes(size: int, left: Cause | None) -> None:
    """Half of all elements cannot be in it twice; very few of them can."""
    gradients = [verdict(Kind.MAIN_GRAD, name) for name in NAMES]
    gradients[1] = dataclasses.replace(gradients[1], shape=(size,))
    twice = Miscounted(
        Cause.COUNTED_TWICE, statistic=Statistic.GRAD_NORM, least=2, most=2, names=NAMES[:1]
    )
    failed = verdict(Kind.COUNTED, NAMES[0], BAD)
    passing = verdict(Kind.GRAD_NORM, "grad_norm")
    norm = math.sqrt(2 + size)
    assert cause(twice, failed, *gradients, passing, norm=norm) is left
    wrong = verdict(Kind.GRAD_NORM, "grad_norm", BAD)
    assert cause(twice, failed, *gradients, wrong, norm=norm) is Cause.COUNTED_TWICE
    strange = verdict(Kind.MAIN_GRAD, STRANGE, Outcome.EXTRA)
    assert cause(twice, failed, *gradients, strange, passing, norm=norm) is left
    # The norm of some: others have their own.
    assert cause(twice, failed, *gradients, passing, norm=0.9 * norm) is Cause.COUNTED_TWICE
    # The reference's may be wrong in the same way.
    assert cause(twice, failed, *gradients, passing, norm=0.0) is Cause.COUNTED_TWICE


def test_an_update_that_passes() -> None:
    """A learning rate that is not the one of the update; a weight decay may be too small to see."""
    failed = verdict(Kind.HYPERPARAMETERS, NAMES[0], BAD)
    update = verdict(Kind.PARAM_DELTA, NAMES[0])
    rate, decay = (
        OtherHyperparameters(Cause.HYPERPARAMETERS, values=((name, 2.0, 1.0),))
        for name in ("lr", "weight_decay")
    )
    assert cause(rate, failed, update) is None
    assert cause(decay, failed, update) is Cause.HYPERPARAMETERS
