# SPDX-License-Identifier: Apache-2.0
"""The gradient's share of an optimizer's moments."""

import dataclasses

import pytest
import torch

from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from tests.diagnose.evidence_by_hand import WEIGHT, evidence_of, explain, meshes, text, values

NUMBERS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "clip_grad": 1.0}


def moment(kind: Kind, times: float, norm: float = 6.0) -> Evidence:
    """A moment to which a gradient of this norm was added ``times`` times."""
    earlier, gradient = values(16, 8, seed=1).abs() * 0.01, values(16, 8, seed=2)
    power, beta = (1, 0.9) if kind is Kind.EXP_AVG else (2, 0.999)
    added = (1 - beta) * (gradient / max(norm, 1.0)) ** power
    trace = {
        dataclasses.replace(WEIGHT, kind=Kind.MAIN_GRAD): gradient,
        TraceKey(1, STEP_LEVEL, Kind.GRAD_NORM, "grad_norm", 0): torch.tensor(norm),
    }
    return evidence_of(
        beta * earlier + added,
        meshes(2),
        lambda _, right: right + (times**power - 1) * added,
        key=dataclasses.replace(WEIGHT, kind=kind),
        tolerance=1e-6,
        trace=trace,
        numbers=NUMBERS,
    )


@pytest.mark.parametrize("kind", [Kind.EXP_AVG, Kind.EXP_AVG_SQ])
@pytest.mark.parametrize(
    ("times", "cause", "words"),
    [
        (6.0, Cause.TOO_LARGE, "6.000 times too large = the gradient norm over its limit"),
        (1 / 6, Cause.TOO_SMALL, "6.000 times too small = the gradient norm over its limit"),
        (2.0, Cause.TOO_LARGE, "2.000 times too large = the size of dp"),
        (0.0, Cause.ZERO, "its gradient is not in it"),
    ],
)
def test_the_gradient_counts_otherwise(kind: Kind, times: float, cause: Cause, words: str) -> None:
    """Clipped twice or never, a reduction too many, no gradient at all."""
    found = explain(moment(kind, times))
    assert found is not None
    assert found.cause is cause
    assert words in text(found)


def test_another_moment_is_not_explained() -> None:
    """What is added is no multiple of the gradient."""
    evidence = moment(Kind.EXP_AVG, 1.0)
    noise = values(16, 8, seed=3) * 0.01
    other = evidence_of(
        evidence.reference,
        meshes(2),
        lambda _, right: right + noise,
        key=evidence.key,
        tolerance=1e-6,
        numbers=NUMBERS,
        trace={dataclasses.replace(WEIGHT, kind=Kind.MAIN_GRAD): values(16, 8, seed=2)},
    )
    assert explain(other) is None
