# SPDX-License-Identifier: Apache-2.0
"""Partial sums, averages not taken, drifted copies, shares that do not count."""

import dataclasses

import pytest
import torch

from megatron_ttrace.diagnose import replicas, shares, sources
from megatron_ttrace.mcore.names import EMBEDDING_WEIGHT
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.findings import Cause, ConstantFactor
from megatron_ttrace.trace.records import Kind, TraceKey
from tests.diagnose.evidence_by_hand import WEIGHT, evidence_of, explain, hint, meshes, text, values

NORM = dataclasses.replace(WEIGHT, name="decoder.final_layernorm.weight")


@pytest.mark.parametrize(
    ("layout", "world", "axis"),
    [({"tp": 2}, 2, "tp"), ({"tp": 2, "cp": 2}, 4, "cp"), ({"tp": 2, "cp": 2}, 4, "tp+cp")],
)
def test_partial_sums(layout: dict[str, int], world: int, axis: str) -> None:
    """Partial sums over an axis, or two, are named after these and no others."""
    reference, ranks = values(64), meshes(world, **layout)
    parts = {}
    for mesh in ranks:
        own = tuple(mesh.at(a) for a in axis.split("+"))
        parts[mesh.rank] = values(64, seed=7 + hash(own) % 100)
    groups = {tuple(mesh.at(a) for a in axis.split("+")): parts[mesh.rank] for mesh in ranks}
    last = max(groups)
    rest = sum((value for own, value in groups.items() if own != last), torch.zeros(64))
    for mesh in ranks:
        if tuple(mesh.at(a) for a in axis.split("+")) == last:
            parts[mesh.rank] = reference - rest
    found = explain(evidence_of(reference, ranks, parts, key=NORM))
    assert found is not None
    assert (found.cause, found.axes) == (Cause.PARTIAL, tuple(axis.split("+")))
    assert "partial sums over" in text(found)


def test_average_not_taken() -> None:
    """Each rank's own value, whose mean is the reference."""
    reference = values(64)
    off = values(64, seed=1)
    found = explain(
        evidence_of(reference, meshes(2), {0: reference + off, 1: reference - off}, key=NORM)
    )
    assert found is not None
    assert "missing average over dp" in hint(found)


def test_sharded_partial_sums() -> None:
    """Shards over tp whose sum over cp was left out."""
    reference, ranks = values(8, 16), meshes(4, tp=2, cp=2)
    placement = (Step("tp", Shard(0)),)

    def held(rank: int, right: torch.Tensor) -> torch.Tensor:
        share = values(*right.shape, seed=5)
        return share if ranks[rank].at("cp") else right - share

    found = explain(evidence_of(reference, ranks, held, placement=placement))
    assert found is not None
    assert found.axes == ("cp",)


def test_unrelated_replicas_are_no_partial_sums() -> None:
    """Replicas that differ but do not add up stay unknown."""
    evidence = evidence_of(
        values(64), meshes(2, tp=2), {0: values(64, seed=1), 1: values(64, seed=2)}, key=NORM
    )
    assert explain(evidence) is None


def test_tied_embedding() -> None:
    """First and last stage keep their own part of a tied gradient."""
    reference = values(16, 8)
    own = values(16, 8, seed=1)
    key = dataclasses.replace(WEIGHT, name=EMBEDDING_WEIGHT)
    found = explain(evidence_of(reference, meshes(2, pp=2), {0: own, 1: reference - own}, key=key))
    assert found is not None
    assert (found.cause, found.axes) == (Cause.PARTIAL, ("pp",))


def test_some_copies() -> None:
    """Only one of four copies is wrong, which says nothing about the cause."""
    reference = values(16, 8)
    held = dict.fromkeys(range(4), reference) | {3: values(16, 8, seed=4)}
    evidence = evidence_of(reference, meshes(4), held)
    assert explain(evidence) is None
    found = replicas.some_copies(evidence)
    assert "rank 3 holds a wrong copy, the copies on ranks 0..2 are right" in text(found)


def test_right_replica_is_not_added() -> None:
    """A replica that is too small beside one that passes is no partial sum: it is too small."""
    reference = values(64, 8)
    held = {0: reference, 1: reference / 5}
    found = explain(evidence_of(reference, meshes(2, tp=2), held, key=NORM))
    assert isinstance(found, ConstantFactor)
    assert found.ratio == pytest.approx(0.2)


def _linear(batches: int) -> tuple[dict[TraceKey, torch.Tensor], list[torch.Tensor]]:
    """The trace of a linear layer, and each microbatch's share of its weight's gradient."""
    module = WEIGHT.name.removesuffix(".weight")
    trace, products = {}, []
    for number in range(batches):
        fed, gradient = values(5, 2, 8, seed=number), values(5, 2, 12, seed=50 + number)
        trace[TraceKey(1, number, Kind.INPUT, module, 0)] = fed
        trace[TraceKey(1, number, Kind.GRAD_OUTPUT, module, 0)] = gradient
        products.append(gradient.flatten(0, 1).T @ fed.flatten(0, 1))
    return trace, products


def test_unequal_microbatches() -> None:
    """Data-parallel ranks whose shares count by their own number of tokens."""
    trace, products = _linear(4)
    wrong = sum(p * (0.9 if n % 2 else 1.1) for n, p in enumerate(products))
    assert torch.is_tensor(wrong)
    evidence = evidence_of(sum(products), meshes(2), lambda *_: wrong, trace=trace)  # type: ignore[arg-type]
    found = explain(evidence)
    assert found is not None
    assert "dp 0: 1.100, dp 1: 0.900" in text(found)


def test_lost_microbatch() -> None:
    """A microbatch whose gradient was overwritten instead of added to."""
    trace, products = _linear(3)
    total = products[0] + products[1] + products[2]
    evidence = evidence_of(total, meshes(1), lambda *_: total - products[1], trace=trace)
    found = shares.weighted(evidence)
    assert found is not None
    assert "share of microbatch 1 is missing" in text(found)


@pytest.mark.parametrize("apart", [0.0, 1e-4])
def test_shares_that_are_alike(apart: float) -> None:
    """Which of two equal microbatches counts too often cannot be known."""
    trace, _ = _linear(2)
    for key, value in [*trace.items()]:
        first = trace[dataclasses.replace(key, microbatch=0)]
        trace[key] = first + apart * value if key.microbatch else first
    products = [
        trace[dataclasses.replace(key, kind=Kind.GRAD_OUTPUT)].flatten(0, 1).T @ fed.flatten(0, 1)
        for key, fed in trace.items()
        if key.kind is Kind.INPUT
    ]
    wrong = 1.4 * products[0] + 0.9 * products[1]
    evidence = evidence_of(
        sum(products),
        meshes(1),
        lambda *_: wrong,
        trace=trace,
        tolerance=1e-2,  # type: ignore[arg-type]
    )
    assert shares.weighted(evidence) is None


def test_shares_that_do_not_explain() -> None:
    """A gradient that is no sum of shares has no weights."""
    trace, products = _linear(3)
    total = products[0] + products[1] + products[2]
    wrong = total + values(12, 8, seed=9)
    assert shares.weighted(evidence_of(total, meshes(1), lambda *_: wrong, trace=trace)) is None


def test_overwritten_input() -> None:
    """A weight's gradient made with the next layer's input."""
    trace, products = _linear(2)
    module = WEIGHT.name.removesuffix(".weight")
    after = module.replace("layers.0", "layers.1")
    wrong = torch.zeros(12, 8)
    for number in range(2):
        fed = values(5, 2, 8, seed=80 + number)
        trace[TraceKey(1, number, Kind.INPUT, after, 0)] = fed
        gradient = trace[TraceKey(1, number, Kind.GRAD_OUTPUT, module, 0)]
        wrong += gradient.flatten(0, 1).T @ fed.flatten(0, 1)
    evidence = evidence_of(products[0] + products[1], meshes(1), lambda *_: wrong, trace=trace)
    found = sources.operand(evidence)
    assert found is not None
    assert f"the input of {after}" in text(found)


def test_overwritten_input_of_a_fused_norm() -> None:
    """A linear layer with a norm inside multiplies the normed input, another one's in this case."""
    module = WEIGHT.name.removesuffix(".weight")
    after = module.replace("layers.0", "layers.1")
    trace, grads = {}, {}
    for name in (module, after):
        scale = values(8, seed=len(name)).abs() + 0.5
        trace[TraceKey(1, -1, Kind.PARAM, f"{name}.layer_norm_weight", 0)] = scale
        fed = values(5, 2, 8, seed=1 + (name == after))
        trace[TraceKey(1, 0, Kind.INPUT, name, 0)] = fed
        grads[name] = fed * torch.rsqrt(fed.square().mean(-1, keepdim=True) + 1e-5) * scale
    gradient = values(5, 2, 12, seed=9)
    trace[TraceKey(1, 0, Kind.GRAD_OUTPUT, module, 0)] = gradient
    right, wrong = (gradient.flatten(0, 1).T @ grads[n].flatten(0, 1) for n in (module, after))
    found = sources.operand(evidence_of(right, meshes(1), lambda *_: wrong, trace=trace))
    assert found is not None
    assert f"the input of {after}" in text(found)


def test_signs_add_up_by_chance() -> None:
    """Opposite signs on two ranks, where the reference is zero."""
    held = {rank: (-1.0) ** rank * torch.tensor([0.1, -0.1, 0.1, 0.1]) for rank in range(2)}
    assert explain(evidence_of(torch.zeros(4), meshes(2, tp=2), held)) is None
