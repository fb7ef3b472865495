# SPDX-License-Identifier: Apache-2.0
"""What surrounds a model of transformers while it runs."""

import math

import torch

from megatron_ttrace.compare.tolerance import Tolerance
from megatron_ttrace.saved.huggingface.process import _Replayed

LIMIT = Tolerance(1e-6, 1.0)


def test_ties() -> None:
    """A choice that rounding explains is replaced by the trace's, in the trace's order."""
    scores = torch.tensor([[0.0, 3.0, 2.0, 2.0 - 1e-7], [0.0, 3.0, 2.0, 1.9]])
    with _Replayed(torch.tensor([[3, 1], [3, 1]]), 4, LIMIT):
        values, chosen = scores.topk(2, sorted=False)
    assert chosen[0].tolist() == [3, 1]
    assert values[0].equal(scores[0, [3, 1]])
    assert {*chosen[1].tolist()} == {1, 2}


def test_ties_of_groups() -> None:
    """Groups of experts are those of the trace's choice, if these are as good."""
    groups = torch.tensor([[2.0, 1.0, 1.0 + 1e-7], [2.0, 1.0, 1.5]])
    experts = torch.tensor([[0.5, 1.5, -math.inf, 1.0, -math.inf, -math.inf]]).repeat(2, 1)
    best = torch.rand(2, 3, 2)
    with _Replayed(torch.tensor([[1, 3], [1, 3]]), 6, LIMIT):
        chosen = groups.topk(2, sorted=False).indices
        assert best.topk(2).values.equal(best.sort(descending=True).values)
        assert experts.topk(2, sorted=False).indices.tolist() == [[1, 3], [1, 3]]
    assert [{*row} for row in chosen.tolist()] == [{0, 1}, {0, 2}]
