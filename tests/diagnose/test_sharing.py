# SPDX-License-Identifier: Apache-2.0
"""Several names of one error, and its consequences within a stage."""

import dataclasses

import pytest

from megatron_ttrace.trace.records import Kind, Outcome
from tests.diagnose.judged_by_hand import localise
from tests.diagnose.test_culprits import run, verdict

FC1, ROUTER = "decoder.layers.0.mlp.shared_experts.linear_fc1", "decoder.layers.0.mlp.router"


@pytest.mark.parametrize(
    ("weights", "named"),
    [((ROUTER,), [ROUTER]), ((FC1, ROUTER), [FC1, ROUTER]), ((), [FC1, ROUTER])],
)
def test_modules_that_share_their_input(weights, named) -> None:
    """The one with a wrong weight gradient is named; without such a difference all are."""
    verdicts = [
        *(verdict(name, kind) for name in (FC1, ROUTER) for kind in (Kind.INPUT, Kind.OUTPUT)),
        *(verdict(name, Kind.GRAD_OUTPUT) for name in (FC1, ROUTER)),
        *(verdict(name, Kind.GRAD_INPUT, Outcome.DIVERGED, margin=9.0) for name in (FC1, ROUTER)),
        *(verdict(f"{name}.weight", Kind.MAIN_GRAD, Outcome.DIVERGED) for name in weights),
    ]
    assert [culprit.name for culprit in localise(verdicts)] == named


def test_other_errors_are_not_shared() -> None:
    """Different sizes of the error are different gradients."""
    verdicts = [
        *(verdict(name, Kind.GRAD_OUTPUT) for name in (FC1, ROUTER)),
        verdict(FC1, Kind.GRAD_INPUT, Outcome.DIVERGED, margin=60.0),
        verdict(ROUTER, Kind.GRAD_INPUT, Outcome.DIVERGED, margin=90.0),
        verdict(f"{ROUTER}.weight", Kind.MAIN_GRAD, Outcome.DIVERGED),
    ]
    assert [culprit.name for culprit in localise(verdicts)] == [FC1, ROUTER]


def test_zeros_are_not_shared() -> None:
    """All that is zero has the error 1, in the same tensor or not."""
    zeros = [
        dataclasses.replace(one, rel_err=1.0)
        for one in (
            verdict(FC1, Kind.GRAD_INPUT, Outcome.DIVERGED, margin=9.0),
            verdict(ROUTER, Kind.GRAD_INPUT, Outcome.DIVERGED, margin=9.0),
        )
    ]
    verdicts = [
        *(verdict(name, Kind.GRAD_OUTPUT) for name in (FC1, ROUTER)),
        *zeros,
        verdict(f"{ROUTER}.weight", Kind.MAIN_GRAD, Outcome.DIVERGED),
    ]
    assert [culprit.name for culprit in localise(verdicts)] == [FC1, ROUTER]


def test_moments_come_before_the_change() -> None:
    """The change of a parameter is computed from its moments."""
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    verdicts = [
        *run(),
        verdict(name, Kind.PARAM_DELTA, Outcome.DIVERGED, margin=90.0),
        verdict(name, Kind.EXP_AVG, Outcome.DIVERGED, margin=20.0),
        verdict(name, Kind.EXP_AVG_SQ, Outcome.DIVERGED, margin=40.0),
    ]
    (culprit,) = localise(verdicts)
    assert culprit.kind is Kind.EXP_AVG


def test_what_no_optimizer_has_is_never_counted() -> None:
    """A main gradient that is only absent: what each optimizer steps says more."""
    name = "decoder.final_layernorm.bias"
    counted = dataclasses.replace(verdict(name, Kind.COUNTED, Outcome.DIVERGED), index=4)
    verdicts = [*run(), verdict(name, Kind.MAIN_GRAD, Outcome.MISSING), counted]
    (culprit,) = localise(verdicts)
    assert culprit.kind is Kind.COUNTED
