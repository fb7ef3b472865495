# SPDX-License-Identifier: Apache-2.0
"""Moments of parts add up to those of the whole, and survive a round trip through JSON."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.trace.checksum import checksum
from megatron_ttrace.trace.moments import Moments, moments_of


@given(st.integers(1, 4000), st.integers(0, 4000), st.sampled_from(["float32", "bfloat16"]))
def test_parts_add_up(first: int, second: int, dtype: str) -> None:
    """The sums are those of torch on the whole tensor, in float64."""
    whole = torch.randn(first + second).mul(0.02).add(3.0).to(getattr(torch, dtype))
    found = moments_of(whole[:first]) + moments_of(whole[first:])
    exact = whole.double()
    assert found.n == first + second
    assert found.mean == pytest.approx(float(exact.mean()))
    assert (found.least, found.most) == (float(exact.min()), float(exact.max()))
    if found.n > 1:
        assert found.std == pytest.approx(float(exact.std()), rel=1e-6, abs=1e-9)


def test_central_fourth_moment() -> None:
    """The kurtosis does not depend on mean and size."""
    drawn = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    for values in (drawn, drawn * 0.02 + 1.0):
        assert moments_of(values).kurtosis == pytest.approx(3.0, abs=0.05)
    assert moments_of(torch.rand(200_000)).kurtosis == pytest.approx(1.8, abs=0.02)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_constant(value: float) -> None:
    """A constant has no scatter, whatever rounding does to its sums."""
    found = moments_of(torch.full((1001,), value))
    assert found.is_constant
    assert (found.scatter, found.std, found.kurtosis) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad: float) -> None:
    """Such elements are counted."""
    assert moments_of(torch.tensor([1.0, bad, bad])).nonfinite == 2


def test_nothing() -> None:
    """An empty part changes nothing."""
    some = moments_of(torch.randn(9))
    assert dataclasses.replace(some + moments_of(torch.empty(0)), checksum=0) == (
        dataclasses.replace(some, checksum=0)
    )


def test_round_trip() -> None:
    """As an index line or a message has it; the checksum is of the bits."""
    data = torch.randn(3, 5)
    found = moments_of(data)
    assert found.checksum == checksum(data)
    assert Moments.of(json.loads(json.dumps(dataclasses.astuple(found)))) == found
