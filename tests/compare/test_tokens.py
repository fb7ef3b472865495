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


OTHER_SHAPE, LABELS = {"tokens": torch.zeros(1, 3)}, {"labels": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    ("batches", "dp", "dp_rank", "expected"),
    [
        ([batch(n) for n in range(4)], 1, 0, [0, 1, 2, 3]),
        ([batch(0), batch(2)], 2, 0, [0, 2]),
        ([batch(1), batch(3)], 2, 1, [1, 3]),
        ([batch(2)], 4, 2, [2]),
        # A sampler that deals otherwise than assumed.
        ([batch(0), batch(1)], 2, 0, [0, 1]),
        ([batch(3), batch(0)], 2, 1, [3, 0]),
        ([batch(n) for n in (3, 2, 1, 0)], 1, 0, [3, 2, 1, 0]),
        # An unknown one keeps its expected number; comparing its tokens then fails.
        ([batch(7), batch(2)], 2, 0, [0, 2]),
        ([batch(0), OTHER_SHAPE], 2, 1, [0, 3]),
        # A first tensor of another name is compared by its own name; an empty batch by its place.
        ([{}, {}], 2, 1, [1, 3]),
        ([LABELS], 4, 3, [3]),
    ],
)
def test_content_decides(reference, batches, dp, dp_rank, expected):
    """Whatever the order in which a rank gets them; another iteration knows none of them."""
    assert match(batches, reference, 1, dp, dp_rank) == expected
    assert match(batches, reference, 2, dp, dp_rank) == [
        dp * n + dp_rank for n in range(len(batches))
    ]


def test_equal_microbatches_are_told_apart_by_order(tmp_path):
    """Two microbatches of the same tokens get two numbers."""
    places = [(number, Kind.TOKENS, "tokens", 0) for number in range(2)]
    reference = reference_of(tmp_path, dict.fromkeys(places, torch.ones(2)))
    assert match([{"tokens": torch.ones(2)}] * 2, reference, 1, 1, 0) == [0, 1]
