# SPDX-License-Identifier: Apache-2.0
"""Sums on a device, by the fused kernel (in Triton's interpreter) and in plain PyTorch.

Both must give the numbers of ``measure``, whatever the dtypes, the size and the values.
"""

import dataclasses
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.compare import device
from megatron_ttrace.compare.measure import measure
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.placement.plan import plan
from megatron_ttrace.trace.checksum import MASK, WORDS, checksum, weighted

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([2047, 16384, 16389]))


def whole(shape):
    return plan(shape, (), SINGLE)


@pytest.fixture(scope="module")
def interpreted():
    name = "megatron_ttrace.compare.kernel"
    assert name not in sys.modules, "the kernels are imported without a GPU"
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    from megatron_ttrace.compare import kernel

    yield kernel.fused_sums
    patch.undo()
    del sys.modules[name]


def by(implementation, local, logical, factor=1.0):
    """The sums of a whole tensor by one implementation, read back."""
    row = implementation(local.reshape(-1), logical.reshape(-1), factor)
    return device.read([row.tolist()], whole(tuple(local.shape)))


def measured(local, logical, factor=1.0):
    """The sums by ``measure``, with a device's checksum."""
    sums = measure(local, logical, whole(tuple(local.shape)), factor)
    assert sums.checksum in (0, checksum(local))
    return dataclasses.replace(sums, checksum=int(weighted(local)) & MASK)


def close(found, expected):
    """Equal in what is counted and in the bits; otherwise as close as float64 is."""
    for field in dataclasses.fields(found):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(ours, float):
            scale = max(expected.reference, expected.candidate) if field.name == "dot" else 0.0
            assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12 * scale), field.name
        else:
            assert ours == theirs, field.name


def tensors(size, seed, candidate, reference, holes):
    """A candidate and its reference, with the first elements not finite on some side."""
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(size, generator=generator, dtype=torch.float64)
    c = r * (1 + 0.1 * torch.randn(size, generator=generator, dtype=torch.float64))
    for at, (left, right) in enumerate(holes[:size]):
        c[at], r[at] = left, right
    return c.to(candidate), r.to(reference)


ODD = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.5])


@pytest.mark.parametrize("kind", ["fused", "plain"])
@settings(max_examples=15)
@given(
    size=SIZES,
    seed=st.integers(0, 99),
    candidate=st.sampled_from(FLOATS),
    reference=st.sampled_from(FLOATS),
    factor=st.sampled_from([1.0, 2.0, 3.0]),
    holes=st.lists(st.tuples(ODD, ODD), max_size=4),
)
def test_the_numbers_of_measure(interpreted, kind, size, seed, candidate, reference, factor, holes):
    """Every sum, count and checksum, for any pair of dtypes."""
    if kind == "fused" and {candidate, reference} & FP8:
        holes = []  # the interpreter takes FP8's NaN for a number; tests/gpu has them
    c, r = tensors(size, seed, candidate, reference, holes)
    expected = measured(c, r, factor)
    close(by(interpreted if kind == "fused" else device.plain_row, c, r, factor), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_than_one_part(interpreted, dtype):
    """The checksum of a tensor of several parts depends on their order."""
    size = WORDS * 8 // dtype.itemsize + 12_345
    c, r = tensors(size, 0, dtype, dtype, [])
    expected = measured(c, r)
    close(by(interpreted, c, r), expected)
    close(by(device.plain_row, c, r), expected)
    turned = by(device.plain_row, c.flip(0), r.flip(0))
    assert turned.checksum != expected.checksum


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_discrete(dtype):
    """Integers and booleans go the plain way."""
    c = torch.arange(77).remainder(5).to(dtype)
    r = torch.arange(77).remainder(3).to(dtype)
    assert by(device.plain_row, c, r) == measured(c, r)


def test_small_and_large_numbers(interpreted):
    """Squares that leave float32's range are no matter in float64."""
    for scale in (1e-30, 1e30):
        c, r = (x * scale for x in tensors(1000, 1, torch.float32, torch.float32, []))
        close(by(interpreted, c, r), measured(c, r))
