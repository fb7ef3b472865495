# SPDX-License-Identifier: Apache-2.0
"""Attention's gradients put together wrongly: masks in another order, blocks that do not count."""

import dataclasses
import math

import pytest
import torch

from megatron_ttrace.diagnose import attention
from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.placement.placements import ZigZag
from megatron_ttrace.placement.plan import Step, plan
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.views import logical_view
from tests.diagnose.evidence_by_hand import evidence_of, explain, meshes, text, values

S, B, H, G, D = 16, 2, 4, 2, 8
KEY = TraceKey(1, 0, Kind.GRAD_INPUT, "decoder.layers.1.self_attention.core_attention", 0)
CP = (Step("cp", ZigZag(0)),)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(groups: int = G) -> Inputs:
    """q, k, v and the output's gradient, laid out as in a trace."""
    q, grad = values(S, B, H, D, seed=1), values(S, B, H * D, seed=4)
    return q, values(S, B, groups, D, seed=2), values(S, B, groups, D, seed=3), grad


def causal() -> torch.Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def gradients(given: Inputs, weight: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of q, k and v where ``weight[i, j]`` says how often key j counts for query i.

    Written out for whole sequences, without blocks; the normaliser is the right one.
    """
    q, k, v = (t.double().permute(1, 2, 0, 3) for t in given[:3])
    grad = given[3].double().view(S, B, H, D).permute(1, 2, 0, 3)
    groups = k.shape[1]
    k, v = (t.repeat_interleave(H // groups, 1) for t in (k, v))
    score = q @ k.transpose(-1, -2) / math.sqrt(D)
    lse = score.masked_fill(~causal(), -math.inf).logsumexp(-1, keepdim=True)
    right = torch.exp(score - lse) * causal()
    delta = ((right @ v) * grad).sum(-1, keepdim=True)
    p = torch.exp(score - lse) * weight.double()
    off = p * (grad @ v.transpose(-1, -2) - delta) / math.sqrt(D)
    wrong = off @ k, off.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    return [
        wrong[0].permute(2, 0, 1, 3).float(),
        *(t.view(B, groups, -1, S, D).sum(2).permute(2, 0, 1, 3).float() for t in wrong[1:]),
    ]


def positions(size: int) -> list[torch.Tensor]:
    """What each context-parallel rank holds: chunk r and its mirror image."""
    chunks = torch.arange(S).chunk(2 * size)
    return [torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)]


def evidence(given: Inputs, wrong: torch.Tensor, index: int, size: int) -> Evidence:
    key = dataclasses.replace(KEY, index=index)
    trace = {dataclasses.replace(KEY, kind=Kind.GRAD_OUTPUT): given[3]}
    for number, tensor in enumerate(given[:3]):
        trace[dataclasses.replace(KEY, kind=Kind.INPUT, index=number)] = tensor
    ranks = meshes(size, cp=size)
    placement = CP if size > 1 else ()
    held = {
        mesh.rank: torch.cat([logical_view(wrong, b) for b in plan(wrong.shape, placement, mesh)])
        for mesh in ranks
    }
    reference = gradients(given, causal())[index]
    return evidence_of(reference, ranks, held, key=key, trace=trace, placement=placement)


def test_the_formula() -> None:
    """What these tests take for the right gradient is what autograd gives."""
    q, k, v, grad = (t.double().requires_grad_() for t in inputs(H))
    heads = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    out.backward(grad.detach().view(S, B, H, D).permute(1, 2, 0, 3))
    for ours, theirs in zip(gradients(inputs(H), causal()), (q, k, v), strict=True):
        assert theirs.grad is not None
        assert torch.allclose(ours.double(), theirs.grad, atol=1e-5)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    ("size", "order", "words"),
    [
        (2, [1, 0], "in reverse order"),
        (4, [3, 2, 1, 0], "in reverse order"),
        (4, [1, 2, 3, 0], "shifted by 1"),
        (4, [0, 0, 0, 0], "own block of keys for all blocks"),
    ],
)
def test_masks_of_other_blocks(index: int, size: int, order: list[int], words: str) -> None:
    """A ring whose backward pass takes the blocks' masks in the wrong order."""
    at = positions(size)
    weight = torch.zeros(S, S)
    for rank in range(size):
        for step in range(size):
            other = at[(rank - order[step]) % size]
            mask = (other[None, :] <= at[rank][:, None]).float()
            weight[at[rank][:, None], at[(rank - step) % size][None, :]] = mask
    given = inputs()
    finding = explain(evidence(given, gradients(given, weight)[index], index, size))
    assert finding is not None
    assert (finding.cause, finding.axes) == (Cause.ATTENTION_MASK, ("cp",))
    assert words in text(finding)
    assert f"gradient of {'qkv'[index]}" in text(finding)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    ("times", "words"), [(0.0, "is missing"), (2.0, "counts 2.000 times"), (0.5, "counts 0.500")]
)
def test_blocks_that_do_not_count_once(index: int, times: float, words: str) -> None:
    """What other ranks' keys give is lost, doubled or halved."""
    at = positions(2)
    weight = causal().float()
    for rank in range(2):
        weight[at[rank][:, None], at[1 - rank][None, :]] *= times
    given = inputs()
    finding = explain(evidence(given, gradients(given, weight)[index], index, 2))
    assert finding is not None
    assert (
        f"block of step 1 of 0..1 of the ring adds to the gradient of {'qkv'[index]} {words}"
        in text(finding)
    )


def test_no_mask() -> None:
    """Also on one rank."""
    given = inputs()
    finding = attention.blocks(evidence(given, gradients(given, torch.ones(S, S))[0], 0, 1))
    assert finding is not None
    assert "no causal mask" in text(finding)


def test_other_errors_are_not_explained() -> None:
    """Noise is neither a mask nor a missing block."""
    given = inputs()
    wrong = gradients(given, causal())[0] + values(S, B, H, D, seed=9)
    assert attention.blocks(evidence(given, wrong, 0, 2)) is None


def test_an_attention_that_is_not_this_one() -> None:
    """Where the formula does not give the reference's own gradient, nothing is reported."""
    given = inputs()
    wrong = gradients(given, torch.ones(S, S))[0]
    failed = evidence(given, wrong, 0, 1)
    failed = dataclasses.replace(failed, reference=gradients(given, causal() * 1.7)[0])
    assert attention.blocks(failed) is None


@pytest.mark.parametrize(
    "change", [{"kind": Kind.GRAD_OUTPUT}, {"index": 3}, {"name": "decoder.layers.1.mlp"}]
)
def test_other_tensors(change: dict[str, object]) -> None:
    given = inputs()
    failed = evidence(given, gradients(given, torch.ones(S, S))[0], 0, 1)
    key = dataclasses.replace(KEY, **change)
    assert attention.blocks(dataclasses.replace(failed, key=key)) is None
