# SPDX-License-Identifier: Apache-2.0
"""Terms of the cross entropy and of its gradient."""

import pytest
import torch

from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import ROOT, Kind, TraceKey
from tests.diagnose.evidence_by_hand import evidence_of, explain, meshes, text, values

LOSS, LOGITS = (TraceKey(1, 0, Kind.OUTPUT, name, 0) for name in (ROOT, "output_layer"))
GRADIENT = TraceKey(1, 0, Kind.GRAD_OUTPUT, "output_layer", 0)
SEQUENCE, BATCH, WORDS = 8, 3, 16


def logits() -> torch.Tensor:
    """Of all positions."""
    return 3 * values(SEQUENCE, BATCH, WORDS, seed=1)


def labels() -> torch.Tensor:
    """One per token, which is not the token."""
    return torch.randint(0, WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(2))


def loss_evidence(label: float = 1.0, noise: float = 0.0) -> Evidence:
    """The loss, with another weight of the label's logit."""
    high = logits() - logits().amax(-1, keepdim=True)
    total = high.logsumexp(-1).T
    own = high.gather(-1, labels().T[..., None])[..., 0].T
    off = noise * values(BATCH, SEQUENCE, seed=3)
    trace = {LOGITS: logits()}
    for index, ids in enumerate((labels().flip(1), labels())):
        trace[TraceKey(1, 0, Kind.INPUT, ROOT, index)] = ids
    held = dict.fromkeys(range(2), total - label * own + off)
    return evidence_of(total - own, meshes(2, tp=2), held, key=LOSS, tolerance=1e-5, trace=trace)


def gradient_evidence(softmax: float = 1.0, one: float = 1.0) -> Evidence:
    """The gradient, with other weights of the softmax and of the one at the label."""
    scale = 0.1 + values(BATCH, SEQUENCE, seed=4).abs()
    ones = torch.nn.functional.one_hot(labels().T, WORDS).float()
    probabilities, g = logits().softmax(-1), scale.T[..., None]
    trace = {
        LOGITS: logits(),
        TraceKey(1, 0, Kind.INPUT, ROOT, 0): labels(),
        TraceKey(1, 0, Kind.GRAD_OUTPUT, ROOT, 0): scale,
    }
    held = dict.fromkeys(range(2), (softmax * probabilities - one * ones) * g)
    reference = (probabilities - ones) * g
    return evidence_of(reference, meshes(2, tp=2), held, key=GRADIENT, tolerance=1e-5, trace=trace)


@pytest.mark.parametrize(
    ("evidence", "cause", "words"),
    [
        (
            loss_evidence(2.0),
            Cause.TOO_LARGE,
            "the logit of the label is 2.000 times too large = the size of tp",
        ),
        (loss_evidence(0.0), Cause.ZERO, "the logit of the label is missing"),
        (gradient_evidence(softmax=2.0), Cause.TOO_LARGE, "the softmax is 2.000 times too large"),
        (gradient_evidence(one=0.0), Cause.ZERO, "the one at the label is missing"),
    ],
)
def test_a_term(evidence: Evidence, cause: Cause, words: str) -> None:
    """Doubled, missing, never or twice divided."""
    found = explain(evidence)
    assert found is not None
    assert found.cause is cause
    assert words in text(found, evidence.key)


def test_noise_is_no_term() -> None:
    """The loss of other logits is not explained by its terms."""
    assert explain(loss_evidence(noise=1.0)) is None
