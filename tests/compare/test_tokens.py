# SPDX-License-Identifier: Apache-2.0
"""Microbatches are recognised by their content."""

import pytest
import torch

from megatron_ttrace.compare.tokens import match
from megatron_ttrace.trace.records import Kind
from tests.compare.traces import reference_of


def batch(number):
    return {"tokens": torch.arange(6).view(2, 3) + 10 * number, "labels": torch.zeros(2, 3)}


@pytest.fixture
def reference(tmp_path):
    batches = {number: batch(number) for number in range(4)}
    return reference_of(
        tmp_path, {(n, Kind.TOKENS, name, 0): v for n in batches for name, v in batches[n].items()}
    )


@pytest.mark.parametrize(
    ("held", "dp", "dp_rank", "expected"),
    [
        ([0, 1, 2, 3], 1, 0, [0, 1, 2, 3]),
        ([0, 2], 2, 0, [0, 2]),
        ([1, 3], 2, 1, [1, 3]),
        ([2], 4, 2, [2]),
        # a sampler that deals otherwise than assumed
        ([0, 1], 2, 0, [0, 1]),
        ([3, 0], 2, 1, [3, 0]),
        ([3, 2, 1, 0], 1, 0, [3, 2, 1, 0]),
    ],
)
def test_content_decides(reference, held, dp, dp_rank, expected):
    """Whatever the order in which a rank gets them."""
    batches = [batch(number) for number in held]
    assert match(batches, reference, 1, dp, dp_rank) == expected


def test_an_unknown_microbatch_keeps_its_expected_number(reference):
    """Comparing its tokens then fails, and that is the verdict."""
    assert match([batch(7), batch(2)], reference, 1, 2, 0) == [0, 2]
    other_shape = {"tokens": torch.zeros(1, 3)}
    assert match([batch(0), other_shape], reference, 1, 2, 1) == [0, 3]


def test_equal_microbatches_are_told_apart_by_order(tmp_path):
    """Two microbatches of the same tokens get two numbers."""
    places = [(number, Kind.TOKENS, "tokens", 0) for number in range(2)]
    reference = reference_of(tmp_path, dict.fromkeys(places, torch.ones(2)))
    assert match([{"tokens": torch.ones(2)}] * 2, reference, 1, 1, 0) == [0, 1]


def test_another_iteration_knows_no_microbatch(reference):
    assert match([batch(3), batch(1)], reference, 2, 2, 1) == [1, 3]


def test_batches_without_tokens(reference):
    """A first tensor of another name is compared by its own name; an empty batch by its place."""
    assert match([{}, {}], reference, 1, 2, 1) == [1, 3]
    assert match([{"labels": torch.zeros(2, 3)}], reference, 1, 4, 3) == [3]
