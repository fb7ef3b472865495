# SPDX-License-Identifier: Apache-2.0
"""All zero, constant factors, signs, coarse rounding."""

import dataclasses

import pytest
import torch

from megatron_ttrace.diagnose import scaling
from megatron_ttrace.trace.findings import Cause, ConstantFactor
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from tests.diagnose.evidence_by_hand import (
    OUTPUT,
    WEIGHT,
    evidence_of,
    explain,
    hint,
    meshes,
    text,
    values,
)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Kind.PARAM_DELTA, "never updated"), (Kind.MAIN_GRAD, "the gradient is zero")],
)
def test_zero(kind: Kind, words: str) -> None:
    """A parameter that never moves is unknown to the optimizer."""
    key = dataclasses.replace(WEIGHT, kind=kind)
    evidence = evidence_of(values(8, 4), meshes(2), lambda _, right: right * 0, key=key)
    found = scaling.zero(evidence)
    assert found is not None
    assert words in text(found, key)
    assert found.cause is Cause.ZERO
    assert hint(found, key)


def test_nearly_zero_is_not_zero() -> None:
    """One element that is not zero is a value."""

    def held(_: int, right: torch.Tensor) -> torch.Tensor:
        changed = right * 0
        changed[0, 0] = 1e-9
        return changed

    assert scaling.zero(evidence_of(values(8, 4), meshes(2), held)) is None


@pytest.mark.parametrize(
    ("layout", "factor", "axis", "words"),
    [
        ({"tp": 2, "cp": 3}, 3.0, "cp", "3.000 times too large = the size of cp"),
        ({"cp": 4}, 0.25, "cp", "4.000 times too small"),
        ({"tp": 2, "pp": 3}, 6.0, "tp+pp", "tp·pp"),
        ({"tp": 2}, 1.3, "", "not a size of this layout"),
        ({"tp": 2}, -1.0, "", "sign is flipped"),
    ],
)
def test_factor(layout: dict[str, int], factor: float, axis: str, words: str) -> None:
    """A factor is named after the axes whose size it is."""
    world = 1
    for size in layout.values():
        world *= size
    found = scaling.factor(
        evidence_of(values(8, 4), meshes(world, **layout), lambda _, right: right * factor)
    )
    assert found is not None
    assert words in text(found)
    assert found.axes == tuple(filter(None, axis.split("+")))


def test_factor_is_tested() -> None:
    """What is not a multiple of the reference has no factor."""
    evidence = evidence_of(
        values(8, 4), meshes(2), lambda r, right: right * 2 + values(8, 4, seed=9)
    )
    assert scaling.factor(evidence) is None


@pytest.mark.parametrize(("noise", "is_factor"), [(0.25, True), (0.8, False)])
def test_a_larger_value_has_larger_rounding(noise: float, is_factor: bool) -> None:
    """Multiplying by five multiplies rounding by five; more than that is another fault.

    ``noise`` is in tolerances, of the values before the repair.
    """
    tolerance, reference = 5e-2, values(32, 32)
    rounding = noise * tolerance * values(32, 32, seed=3)

    def held(_: int, right: torch.Tensor) -> torch.Tensor:
        return right / 5 + rounding

    evidence = evidence_of(reference, meshes(1), held, tolerance=tolerance)
    found = scaling.factor(evidence)
    assert (found is not None) is is_factor
    assert found is None or found.ratio == pytest.approx(0.2, rel=0.02)


def test_softmax_scale() -> None:
    """A head dim of 16 and a query gradient of a quarter: the scale was applied twice."""
    key = dataclasses.replace(
        OUTPUT, kind=Kind.GRAD_INPUT, name="decoder.layers.0.self_attention.core_attention"
    )
    evidence = evidence_of(values(6, 2, 4, 16), meshes(1), lambda _, right: right / 4, key=key)
    found = scaling.factor(evidence)
    assert found is not None
    assert "softmax scale" in text(found)
    assert "twice" in hint(found)


def test_factor_per_rank() -> None:
    """Each rank its own factor; a common one is the other hypothesis' business."""
    evidence = evidence_of(values(8, 4), meshes(2, cp=2), lambda rank, right: right * (rank + 2))
    assert scaling.factor(evidence) is None
    found = scaling.factor_per_rank(evidence)
    assert found is not None
    assert "rank 0: 2, rank 1: 3" in text(found)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float8_e4m3fn, "FP8 (E4M3)")],
)
def test_rounded(dtype: torch.dtype, name: str) -> None:
    """Values rounded to a coarser dtype are recognised by that rounding."""
    evidence = evidence_of(
        values(64, 64), meshes(1), lambda _, right: right.to(dtype).float(), tolerance=1e-6
    )
    found = scaling.rounded(evidence)
    assert found is not None
    assert f"rounded to {name}" in text(found)


def test_noise_is_not_rounding() -> None:
    """Noise of bf16's size is not bf16's rounding."""

    def noisy(_: int, right: torch.Tensor) -> torch.Tensor:
        return right * (1 + values(64, 64, seed=3) * 2**-9)

    assert scaling.rounded(evidence_of(values(64, 64), meshes(1), noisy, tolerance=1e-6)) is None


@pytest.mark.parametrize(
    ("constant", "words"),
    [
        (-0.6931472, "minus the logarithm of the size of tp"),
        (1.0986123, "= the logarithm of the size of cp"),
    ],
)
def test_shift(constant: float, words: str) -> None:
    """A sum of exponentials that is off by a size, in its logarithm."""
    ranks = meshes(6, tp=2, cp=3)
    found = explain(evidence_of(values(8, 4) + 3, ranks, lambda _, right: right + constant))
    assert words in text(found)


def test_another_constant_is_no_shift() -> None:
    """Any mean error is some constant."""
    evidence = evidence_of(values(8, 4), meshes(2, tp=2), lambda _, right: right + 0.3)
    assert scaling.shift(evidence) is None


def test_a_norm_is_a_root() -> None:
    """The mean of two ranks' squares instead of their sum."""
    key = TraceKey(1, STEP_LEVEL, Kind.GRAD_NORM, "grad_norm", 0)
    norm = torch.tensor(6.0)
    held = dict.fromkeys(range(2), norm / 2**0.5)
    found = explain(evidence_of(norm, meshes(2, tp=2), held, key=key))
    assert "1.414 times too small = the root of the size of tp" in text(found)


@pytest.mark.parametrize(
    ("factor", "words"), [(256.0, "the number of tokens of the global batch"), (3.0, "not a size")]
)
def test_numbers_of_the_job(factor: float, words: str) -> None:
    """A factor that is no size of the layout; layers are no factor of a gradient."""
    numbers = {"step_tokens": 256.0, "layers": 3.0}
    evidence = evidence_of(values(8, 4), meshes(2), lambda _, r: r * factor, numbers=numbers)
    assert words in text(explain(evidence))


def test_few_values_fit_a_size_by_chance() -> None:
    """A number that is nearly twice another one is its double only if it is so exactly."""
    tolerance = 1e-2
    for ratio, is_told in ((2.0, True), (2.001, True), (2.01, False)):
        evidence = evidence_of(
            torch.tensor(3.0),
            meshes(2),
            dict.fromkeys(range(2), torch.tensor(3.0 * ratio)),
            tolerance=tolerance,
        )
        assert (explain(evidence) is not None) is is_told, ratio


@pytest.mark.parametrize("reference", [torch.full((64,), 0.4), 0.4 * values(64).sign()])
def test_equal_values_are_one(reference: torch.Tensor) -> None:
    """Any odd function of them is a factor; only a size is told."""
    for ratio, is_told in ((1.37, False), (2.0, True)):
        found = explain(evidence_of(reference, meshes(2), lambda _, own, r=ratio: own * r))
        assert (found is not None) is is_told


def test_sizes_that_are_nearly_equal() -> None:
    """Only those that are a repair are told."""
    key = dataclasses.replace(WEIGHT, kind=Kind.GRAD_OUTPUT)
    found = explain(
        evidence_of(
            values(16, 8),
            meshes(2),
            lambda _, own: own * 64,
            key=key,
            tolerance=1e-2,
            numbers={"tokens": 64.0, "step_tokens": 63.0},
        )
    )
    assert isinstance(found, ConstantFactor)
    assert found.sizes == (("tokens",),)
