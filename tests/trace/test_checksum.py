# SPDX-License-Identifier: Apache-2.0
"""Checksums tell replicas apart: on a CPU, and as a GPU sums them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare.measure import measure
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.checksum import MASK, WORDS, checksum, weighted
from tests.compare.test_measure import random


def on_a_device(tensor):
    """What a GPU computes."""
    return int(weighted(tensor)) & MASK


both = pytest.mark.parametrize("marks", [checksum, on_a_device])


@both
@given(st.data())
def test_a_checksum_tells_replicas_apart(marks, data):
    """One changed, swapped or sign-flipped element of any dtype is another replica."""
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
    )
    n = data.draw(st.integers(2, 70))
    tensor = random((n,), torch.float32, seed=data.draw(st.integers(0, 99)), scale=8).to(dtype)
    where = data.draw(st.integers(0, n - 1))
    other = tensor.clone().float()
    other[where] = -other[where] if other[where] else 1.0
    if dtype is torch.int64 and not tensor[where]:
        other[where] = 1.0
    changed = other.to(dtype)
    assert marks(changed) != marks(tensor)
    there = data.draw(st.integers(0, n - 1))
    swapped = tensor.clone()
    swapped[where], swapped[there] = tensor[there].clone(), tensor[where].clone()
    same = torch.equal(swapped.view(torch.uint8), tensor.view(torch.uint8))
    assert (marks(swapped) == marks(tensor)) == same


@both
def test_a_checksum_does_not_depend_on_where_the_tensor_lies(marks):
    """Views into a larger buffer, at offsets that are no multiple of eight bytes."""
    data = random((200,), torch.bfloat16)
    for offset in range(9):
        view = data[offset : offset + 100]
        assert marks(view) == marks(view.clone())


@both
def test_a_checksum_sees_the_end_and_swapped_rows(marks):
    """Swapped rows have the same elements and are not the same replica."""
    rows = random((1000, 300))
    assert marks(rows) != marks(rows.flip(0))
    for n in (1, 2, 3, 5, 9):
        end = torch.zeros(n, dtype=torch.bfloat16)
        other = end.clone()
        other[-1] = 1.0
        assert marks(end) != marks(other)
    assert marks(torch.tensor([1.0, -0.0])) != marks(torch.tensor([1.0, 0.0]))


@both
def test_of_nothing(marks):
    """No element, no bits."""
    assert marks(torch.zeros(0, 4)) == 0


def test_the_order_of_parts():
    """Parts of the weighted sum that change places change it."""
    data = torch.arange(2 * WORDS)
    assert on_a_device(data) != on_a_device(data.roll(WORDS))


def test_the_storage_can_still_be_resized():
    """Megatron frees outputs that it recomputes by resizing their storage."""
    data = torch.randn(3, 40_000)
    measure(data, data * 2, (Box((0, 0), (3, 40_000), (0, 0)),))
    measure(data, data.clone(), (Box((0, 0), (3, 40_000), (0, 0)),))
    checksum(data)
    data.untyped_storage().resize_(0)
    assert data.untyped_storage().nbytes() == 0
