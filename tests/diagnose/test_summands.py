# SPDX-License-Identifier: Apache-2.0
"""The gradient's share of an optimizer's moments; terms of the cross entropy and its gradient."""

import dataclasses

import pytest
import torch

from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, Kind, TraceKey
from tests.diagnose.evidence_by_hand import WEIGHT, evidence_of, explain, meshes, text, values

NUMBERS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "clip_grad": 1.0}
MAIN_GRAD = dataclasses.replace(WEIGHT, kind=Kind.MAIN_GRAD)
GRAD_NORM = TraceKey(1, STEP_LEVEL, Kind.GRAD_NORM, "grad_norm", 0)
LOSS, LOGITS = (TraceKey(1, 0, Kind.OUTPUT, name, 0) for name in (ROOT, "output_layer"))
GRADIENT = dataclasses.replace(LOGITS, kind=Kind.GRAD_OUTPUT)
SEQUENCE, BATCH, WORDS = 8, 3, 16
SCORES = 3 * values(SEQUENCE, BATCH, WORDS, seed=1)
LABELS = torch.randint(0, WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(2))


def moment(kind: Kind, times: float, *, noise: float = 0.0) -> Evidence:
    """A moment to which a gradient of the norm 6 was added ``times`` times."""
    earlier, gradient = values(16, 8, seed=1).abs() * 0.01, values(16, 8, seed=2)
    power, beta = (1, 0.9) if kind is Kind.EXP_AVG else (2, 0.999)
    added = (1 - beta) * (gradient / 6.0) ** power
    right = beta * earlier + added
    wrong = right + (times**power - 1) * added + noise * values(16, 8, seed=3)
    trace = {MAIN_GRAD: gradient, GRAD_NORM: torch.tensor(6.0)}
    key = dataclasses.replace(WEIGHT, kind=kind)
    held = dict.fromkeys(range(2), wrong)
    more = {"tolerance": 1e-6, "trace": trace, "numbers": NUMBERS}
    return evidence_of(right, meshes(2), held, key=key, **more)  # type: ignore[arg-type]


def loss(label: float = 1.0, noise: float = 0.0) -> Evidence:
    """The loss, with another weight of the label's logit."""
    high = SCORES - SCORES.amax(-1, keepdim=True)
    total = high.logsumexp(-1).T
    own = high.gather(-1, LABELS.T[..., None])[..., 0].T
    trace = {LOGITS: SCORES}
    for index, ids in enumerate((LABELS.flip(1), LABELS)):
        trace[TraceKey(1, 0, Kind.INPUT, ROOT, index)] = ids
    held = dict.fromkeys(range(2), total - label * own + noise * values(BATCH, SEQUENCE, seed=3))
    return evidence_of(total - own, meshes(2, tp=2), held, key=LOSS, tolerance=1e-5, trace=trace)


def gradient(softmax: float = 1.0, one: float = 1.0) -> Evidence:
    """The gradient, with other weights of the softmax and of the one at the label."""
    scale = 0.1 + values(BATCH, SEQUENCE, seed=4).abs()
    ones = torch.nn.functional.one_hot(LABELS.T, WORDS).float()
    probabilities, g = SCORES.softmax(-1), scale.T[..., None]
    trace = {
        LOGITS: SCORES,
        TraceKey(1, 0, Kind.INPUT, ROOT, 0): LABELS,
        TraceKey(1, 0, Kind.GRAD_OUTPUT, ROOT, 0): scale,
    }
    held = dict.fromkeys(range(2), (softmax * probabilities - one * ones) * g)
    right = (probabilities - ones) * g
    return evidence_of(right, meshes(2, tp=2), held, key=GRADIENT, tolerance=1e-5, trace=trace)


@pytest.mark.parametrize(
    ("evidence", "cause", "words"),
    [
        # A moment: clipped twice or never, a reduction too many, no gradient at all.
        *(
            (moment(kind, times), cause, words)
            for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
            for times, cause, words in (
                (6.0, Cause.TOO_LARGE, "6.000 times too large = the gradient norm over its limit"),
                (1 / 6, Cause.TOO_SMALL, "6.000 times too small = the gradient norm over its"),
                (2.0, Cause.TOO_LARGE, "2.000 times too large = the size of dp"),
                (0.0, Cause.ZERO, "its gradient is not in it"),
            )
        ),
        (loss(2.0), Cause.TOO_LARGE, "the label is 2.000 times too large = the size of tp"),
        (loss(0.0), Cause.ZERO, "the logit of the label is missing"),
        (gradient(softmax=2.0), Cause.TOO_LARGE, "the softmax is 2.000 times too large"),
        (gradient(one=0.0), Cause.ZERO, "the one at the label is missing"),
    ],
)
def test_a_summand(evidence: Evidence, cause: Cause, words: str) -> None:
    """Doubled, missing, never or twice divided."""
    finding = explain(evidence)
    assert finding is not None
    assert finding.cause is cause
    assert words in text(finding, evidence.key)


@pytest.mark.parametrize("evidence", [loss(noise=1.0), moment(Kind.EXP_AVG, 1.0, noise=0.01)])
def test_noise_is_no_summand(evidence: Evidence) -> None:
    assert explain(evidence) is None
