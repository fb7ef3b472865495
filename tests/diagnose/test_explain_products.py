# SPDX-License-Identifier: Apache-2.0
"""A product that is off while its bias is right; scales of casts to FP8."""

import dataclasses

import pytest
import torch

from megatron_ttrace.diagnose import products
from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from tests.diagnose.evidence_by_hand import evidence_of, explain, hint, meshes, text, values

KEY = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.self_attention.linear_qkv", 0)
S, B, D, WIDE = 8, 2, 6, 12
TOP = {"E4M3": 448.0, "E5M2": 57344.0}


def fed() -> torch.Tensor:
    """An input whose halves have different largest values."""
    x = values(S, B, D, seed=1)
    x[0, 0, 0], x[S - 1, 0, 0] = 7.0, 5.0
    return x


def evidence(factors: list[float], *, bias: bool = True, x: torch.Tensor | None = None) -> Evidence:
    """A column-parallel layer on two ranks, whose product is off by a factor on each."""
    x = fed() if x is None else x
    weight, b = values(WIDE, D, seed=2), values(WIDE, seed=3) * (1.0 if bias else 0.0)
    product = x @ weight.T
    trace = {dataclasses.replace(KEY, kind=Kind.INPUT): x}
    if bias:
        trace[TraceKey(1, STEP_LEVEL, Kind.PARAM, f"{KEY.name}.bias", 0)] = b
    held = {
        rank: product[..., half] * factors[rank] + b[half]
        for rank, half in enumerate((slice(0, WIDE // 2), slice(WIDE // 2, WIDE)))
    }
    placement = (Step("tp", Shard(2)),)
    return evidence_of(
        product + b,
        meshes(2, tp=2),
        held,
        key=KEY,
        trace=trace,
        placement=placement,
        tolerance=1e-2,
    )


def test_a_factor_beside_the_bias() -> None:
    """Neither a factor of the whole nor something added."""
    found = explain(evidence([0.5, 0.25]))
    assert found is not None
    assert (
        text(found)
        == "the product is off by a factor (rank 0: 0.5, rank 1: 0.25), its bias is right"
    )
    assert found.cause is Cause.FACTOR


def test_without_a_bias_the_whole_is_off() -> None:
    """Then the other hypotheses say it."""
    found = explain(evidence([2.0, 2.0], bias=False))
    assert found is not None
    assert "2.000 times too large = the size of tp" in text(found)


@pytest.mark.parametrize("name", TOP)
@pytest.mark.parametrize("bias", [True, False])
def test_scale_of_the_own_part(name: str, bias: bool) -> None:
    """Each rank's factor is the largest value of its own half over FP8's."""
    found = explain(evidence([7.0 / TOP[name], 5.0 / TOP[name]], bias=bias))
    assert found is not None
    assert found.cause is Cause.CAST
    assert f"of a cast to FP8 ({name}) of its own part of the sequence" in text(found)
    assert "undone and never applied" in hint(found)


def test_scale_of_the_whole_input() -> None:
    found = explain(evidence([448 / 7.0, 448 / 7.0]))
    assert found is not None
    assert "the scale of a cast to FP8 (E4M3) of its input" in text(found)
    assert "applied and never undone" in hint(found)


def test_scales_that_are_equal() -> None:
    """Halves with the same largest value: both are said."""
    x = fed()
    x[S - 1, 0, 0] = 7.0
    found = explain(evidence([7.0 / 448, 7.0 / 448], x=x))
    assert found is not None
    assert "of a cast to FP8 (E4M3) of its own part of the sequence" in text(found)
    assert "or of its input, whose scale is the same here" in text(found)


def test_the_norm_that_is_fused_with_it() -> None:
    """What is multiplied is the normed input."""
    x = fed()
    one = evidence([1.0, 1.0], x=x)
    weight = values(D, seed=5)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    tops = [float(half.abs().amax()) for half in normed.chunk(2)]
    one = evidence([top / 448 for top in tops], x=x)
    inner = one.whole
    name = TraceKey(1, STEP_LEVEL, Kind.PARAM, f"{KEY.name}.layer_norm_weight", 0)
    one.whole = lambda key: weight if key == name else inner(key)
    found = products.factor(one)
    assert found is not None
    assert "its own part of the sequence" in text(found)


def test_a_size_of_the_layout_is_no_cast() -> None:
    """It is a factor of the product."""
    found = products.factor(evidence([2.0, 2.0]))
    assert found is not None
    assert (found.cause, found.dtype) == (Cause.FACTOR, "")


def test_an_error_that_is_no_factor() -> None:
    one = evidence([0.5, 0.25])
    noisy = [
        dataclasses.replace(part, pieces=tuple(p + values(*p.shape, seed=8) for p in part.pieces))
        for part in one.parts
    ]
    one = dataclasses.replace(one, parts=noisy)
    assert products.factor(one) is None


def test_other_kinds() -> None:
    one = evidence([0.5, 0.25])
    key = dataclasses.replace(KEY, kind=Kind.GRAD_INPUT)
    assert products.factor(dataclasses.replace(one, key=key)) is None
