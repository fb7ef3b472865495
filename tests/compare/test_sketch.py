# SPDX-License-Identifier: Apache-2.0
"""Sketches add up as tensors do, and keep their size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.compare import sketch as sketches
from megatron_ttrace.compare.sketch import sketch_of_share, squared_norm
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.placement.plan import plan


def sketch(data):
    """Of the difference from zero."""
    return sketch_of_share(data, torch.zeros_like(data), plan(data.shape, (), SINGLE), 1.0, 1)


@given(st.integers(0, 5000), st.integers(0, 99))
@settings(max_examples=30)
def test_sketches_are_linear(size, seed):
    """The sum of two ranks' sketches is the sketch of their sum."""
    a, b = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)).double()
    together = squared_norm([sketch(a), sketch(b)])
    assert together == pytest.approx(squared_norm([sketch(a + b)]), rel=1e-9, abs=1e-12)
    assert squared_norm([sketch(a), sketch(-a)]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("shape", [(1,), (7, 3), (64, 64), (1000, 48)])
def test_the_norm_is_kept(shape):
    """Within a few of the promised standard deviations; exactly for one element."""
    data = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = squared_norm([sketch(data)])
    assert found == pytest.approx(float(data.double().square().sum()), rel=0.3)


def test_one_wrong_row_counts_fully():
    """However the error is spread: a single row, a single column, a single element."""
    for where in ((3, slice(None)), (slice(None), 5), (2, 2)):
        data = torch.zeros(64, 48)
        data[where] = 1.0
        found = squared_norm([sketch(data)])
        assert found == pytest.approx(float(data.sum()), rel=0.5)


def test_memory_is_bounded(monkeypatch):
    """A large tensor is sketched block by block, each with numbers of its own."""
    monkeypatch.setattr(sketches, "_BLOCK", 100)
    sketches._drawn.cache_clear()
    drawn, original = [], torch.randint

    def kept(*args, **more):
        drawn.append(original(*args, **more))
        return drawn[-1]

    monkeypatch.setattr(torch, "randint", kept)
    data = torch.ones(10, 100, 3)
    found = squared_norm([sketch(data[:, :, 1:])])
    assert found == pytest.approx(2000, rel=0.5)
    assert sum(one.nbytes for one in drawn) == 2000
    assert len({tuple(one.tolist()) for one in drawn}) == 20
    sketches._drawn.cache_clear()
