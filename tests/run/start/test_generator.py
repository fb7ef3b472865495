# SPDX-License-Identifier: Apache-2.0
"""An element has the same bits on every rank, those of a generator that is written down here."""

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.run.start import generator
from megatron_ttrace.run.start.generator import normal


def whole(shape, seed=1, name="w"):
    """The whole logical tensor."""
    return normal(seed, name, shape, [0] * len(shape), shape)


def boxes(max_dims):
    """A shape, and the first index and the size of a box in it; also a scalar, or nothing."""
    shapes = st.lists(st.integers(1, 7), max_size=max_dims)

    def within(shape):
        bounds = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
        return st.tuples(*bounds).map(
            lambda box: (shape, [start for start, _ in box], [end - start for start, end in box])
        )

    return shapes.flatmap(within)


@given(boxes(4))
def test_a_slice_is_the_slice_of_the_whole(box):
    """Any box of any shape, bitwise."""
    shape, origin, extent = box
    values = normal(1, "w", shape, origin, extent)
    assert values.dtype == torch.float64
    slices = tuple(slice(s, s + n) for s, n in zip(origin, extent, strict=True))
    assert torch.equal(values, whole(shape)[slices])


def test_chunks_do_not_show(monkeypatch):
    """Long tensors are generated in pieces."""
    expected = whole((50, 7))
    monkeypatch.setattr(generator, "_CHUNK", 13)
    assert torch.equal(whole((50, 7)), expected)


@given(boxes(3), st.integers(1, 50))
def test_rows_do_not_show(box, rows):
    """A box that is generated some rows at a time has the same bits."""
    shape, origin, extent = box
    target = torch.full(extent, math.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "_ROWS", rows)
        generator.generate(target, 1, "w", shape, origin, lambda values: values.mul_(2))
    assert torch.equal(target, (normal(1, "w", shape, origin, extent) * 2).float())


def test_the_values_are_frozen():
    """Traces are used across releases: these numbers must never change."""
    values = normal(1234, "decoder.layers.0.mlp.linear_fc1.weight", (4, 4), (1, 1), (1, 3))
    assert values.tolist() == [[1.389144295284261, 0.4568124945034974, 1.4302955435618219]]


def by_hand(seed, name, index):
    """One element, in Python's unbounded integers."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    stream = int.from_bytes(digest, "little") >> 1
    total, mask = 0, (1 << 64) - 1
    for draw in range(2):
        bits = ((2 * index + draw) * 0x9E3779B97F4A7C15 + stream) & mask
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        bits ^= bits >> 31
        total += sum((bits >> shift) & 0xFFFF for shift in range(0, 64, 16))
    return (total - 8 * 65535 / 2) * (1.0 / math.sqrt(8 * (65536**2 - 1) / 12))


@given(st.integers(0, 2**31), st.text(max_size=9), st.integers(0, 2**55))
def test_against_whole_numbers_of_any_size(seed, name, index):
    """Signed 64-bit arithmetic that wraps around is unsigned arithmetic."""
    assert float(normal(seed, name, (2**55 + 1,), (index,), (1,))) == by_hand(seed, name, index)


def test_threads_do_not_matter():
    """The vectorised and the scalar loop agree, with one thread or many."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        number = whole((333, 77))
        torch.set_num_threads(2)
        assert torch.equal(whole((333, 77)), number)
    finally:
        torch.set_num_threads(before)
