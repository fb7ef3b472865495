# SPDX-License-Identifier: Apache-2.0
"""Gradients of a linear layer whose microbatches do not count once, or count another's input."""

import dataclasses

import pytest
import torch

from megatron_ttrace.diagnose import shares, sources
from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from tests.diagnose.evidence_by_hand import (
    WEIGHT,
    evidence_of,
    explain,
    meshes,
    products,
    text,
    values,
)

MODULE = WEIGHT.name.removesuffix(".weight")
AFTER = MODULE.replace("layers.0", "layers.1")
Trace = dict[TraceKey, torch.Tensor]


def linear(batches: int) -> Trace:
    """The trace of a linear layer."""
    trace = {}
    for number in range(batches):
        trace[TraceKey(1, number, Kind.INPUT, MODULE, 0)] = values(5, 2, 8, seed=number)
        gradient = values(5, 2, 12, seed=50 + number)
        trace[TraceKey(1, number, Kind.GRAD_OUTPUT, MODULE, 0)] = gradient
    return trace


def weighted(trace: Trace, *weights: float, ranks: int = 1, tolerance: float = 1e-4) -> Evidence:
    """The gradient, with each microbatch's share counted so often."""
    products_by_microbatch = torch.stack(products(trace))
    wrong = (products_by_microbatch * torch.tensor(weights)[:, None, None]).sum(0)
    held = dict.fromkeys(range(ranks), wrong)
    return evidence_of(
        products_by_microbatch.sum(0), meshes(ranks), held, trace=trace, tolerance=tolerance
    )


@pytest.mark.parametrize(
    ("ranks", "weights", "words"),
    [
        (2, (1.1, 0.9, 1.1, 0.9), "dp 0: 1.100, dp 1: 0.900"),
        (1, (1.0, 0.0, 1.0), "share of microbatch 1 is missing"),
    ],
)
def test_shares(ranks: int, weights: tuple[float, ...], words: str) -> None:
    """Ranks count by their own number of tokens; a gradient was overwritten, not added to."""
    assert words in text(explain(weighted(linear(len(weights)), *weights, ranks=ranks)))


def test_shares_of_an_expert() -> None:
    """Of the rows that were dispatched to it: those of one data-parallel rank are missing."""
    experts, trace = "decoder.layers.0.mlp.experts", {}
    module, shares_of_microbatches = f"{experts}.linear_fc1", []
    for number in range(4):
        fed, gradient = values(9, 8, seed=number), values(9, 12, seed=50 + number)
        expert = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
        dispatched = torch.stack([torch.arange(9), expert], dim=1)
        trace[TraceKey(1, number, Kind.ROUTING, experts, 0)] = dispatched
        trace[TraceKey(1, number, Kind.INPUT, module, 0)] = fed
        trace[TraceKey(1, number, Kind.GRAD_OUTPUT, module, 0)] = gradient
        shares_of_microbatches.append(gradient[2:5].T @ fed[2:5])
    right, wrong = sum(shares_of_microbatches), 2 * (sum(shares_of_microbatches[::2]))
    key = dataclasses.replace(WEIGHT, name=f"{module}.weight1")
    evidence = evidence_of(right, meshes(2), {0: wrong, 1: wrong}, key=key, trace=trace)
    assert "dp 0: 2.000, dp 1: 0.000" in text(explain(evidence))


@pytest.mark.parametrize("apart", [0.0, 1e-4])
def test_shares_that_are_alike(apart: float) -> None:
    """Which of two equal microbatches counts too often cannot be known."""
    trace = linear(2)
    for key, value in [*trace.items()]:
        first = trace[dataclasses.replace(key, microbatch=0)]
        trace[key] = first + apart * value if key.microbatch else first
    assert shares.weighted(weighted(trace, 1.4, 0.9, tolerance=1e-2)) is None


@pytest.mark.parametrize("is_normed", [False, True])
def test_an_input_that_was_overwritten(is_normed: bool) -> None:
    """By the next layer's; a linear layer with a norm inside multiplies the normed input."""
    trace = linear(2)
    for number in range(2):
        trace[TraceKey(1, number, Kind.INPUT, AFTER, 0)] = values(5, 2, 8, seed=80 + number)
    multiplied = dict(trace)
    if is_normed:
        for name in (MODULE, AFTER):
            scale = values(8, seed=len(name)).abs() + 0.5
            trace[TraceKey(1, STEP_LEVEL, Kind.PARAM, f"{name}.layer_norm_weight", 0)] = scale
            for number in range(2):
                key = TraceKey(1, number, Kind.INPUT, name, 0)
                fed = trace[key]
                size = fed.square().mean(-1, keepdim=True)
                multiplied[key] = fed * torch.rsqrt(size + 1e-5) * scale
    right, wrong = (torch.stack(products(multiplied, name)).sum(0) for name in (MODULE, AFTER))
    finding = sources.operand(evidence_of(right, meshes(1), lambda *_: wrong, trace=trace))
    assert finding is not None
    assert f"the input of {AFTER}" in text(finding)
