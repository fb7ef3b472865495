# SPDX-License-Identifier: Apache-2.0
"""Ties are not bugs, and bugs are not ties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare.measure import relative_error
from megatron_ttrace.compare.routing import choice, left
from megatron_ttrace.trace.captured import Groups, Routed


def relative(sums):
    """The error of a choice as the judge sees it: of the scores that it is about."""
    return relative_error(sums, rms=0.0)


def draw(seed, tokens=64, experts=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=generator)


@given(st.integers(0, 200), st.integers(1, 3), st.sampled_from([1e-6, 1e-3, 1e-1]))
def test_the_bound_holds(seed, k, noise):
    """A choice that noise alone changed costs at most the noise, relative to the scores."""
    reference = draw(seed)
    moved = noise * torch.randn(reference.shape, generator=torch.Generator().manual_seed(seed + 1))
    scores = reference + moved
    sums, _ = choice(Routed(scores, scores.topk(k).indices), reference.topk(k).indices)
    assert sums.diff <= float(moved.square().sum()) * (1 + 1e-6)


@given(st.integers(0, 200), st.sampled_from([1e-6, 1e-3, 1e-1]))
def test_the_bound_holds_for_groups(seed, noise):
    """Also where a token's groups were tied."""
    groups = Groups(4, 2)
    reference = draw(seed)
    scores = reference + noise * torch.randn(
        reference.shape, generator=torch.Generator().manual_seed(seed + 1)
    )
    sums, _ = choice(
        Routed(scores, _limited(scores, groups, 4), groups), _limited(reference, groups, 4)
    )
    assert sums.diff <= float((scores - reference).square().sum()) * (1 + 1e-6)


def _limited(scores, groups, k):
    """The k best of the best groups, each judged by its k / groups best."""
    tokens, experts = scores.shape
    each = experts // groups.number
    totals = scores.view(tokens, groups.number, each).topk(k // groups.chosen).values.sum(-1)
    allowed = torch.zeros_like(totals, dtype=torch.bool)
    allowed.scatter_(1, totals.topk(groups.chosen).indices, True)
    masked = scores.masked_fill(~allowed.repeat_interleave(each, dim=1), -math.inf)
    return masked.topk(k).indices


@pytest.mark.parametrize("experts", [8, 256])
def test_groups_that_are_not_limited(experts):
    """However many experts there are, whose scores are the size of what is off."""
    groups = Groups(4, 2)
    scores = draw(7, experts=experts).sigmoid()
    right = _limited(scores, groups, 4)
    sums, others = choice(Routed(scores, scores.topk(4).indices, groups), right)
    assert others > 10
    assert relative(sums) > 0.02
    assert choice(Routed(scores, right, groups), right)[0].diff == 0.0


def test_a_tie_is_named_and_costs_nothing():
    """Equal scores, chosen the other way round; the order of the chosen does not count."""
    scores = torch.tensor([[1.0, 1.0, 0.0], [3.0, 2.0, 1.0]])
    sums, others = choice(Routed(scores, torch.tensor([[0], [0]])), torch.tensor([[1], [0]]))
    assert (sums.diff, others) == (0.0, 1)
    sums, others = choice(Routed(scores, torch.tensor([[0, 1]] * 2)), torch.tensor([[1, 0]] * 2))
    assert (sums.diff, others) == (0.0, 0)


@pytest.mark.parametrize("wrong", ["lowest", "shifted", "one token"])
def test_a_wrong_choice_is_far_off(wrong):
    """Tokens at the wrong experts cost as much as scores differ."""
    scores = draw(4)
    right = scores.topk(2).indices
    chosen = {
        "lowest": (-scores).topk(2).indices,
        "shifted": (right + 1) % 8,
        "one token": torch.cat([(-scores[:1]).topk(2).indices, right[1:]]),
    }[wrong]
    sums, others = choice(Routed(scores, chosen), right)
    assert relative(sums) > 0.01
    assert others >= 1


def test_a_wrong_choice_beside_an_expert_that_nobody_may_choose():
    """Its score is infinite, and hides nothing."""
    scores = draw(3)
    scores[:, 5] = -math.inf
    right, wrong = scores.topk(2).indices, scores.topk(4).indices[:, 2:]
    sums, others = choice(Routed(scores, wrong), right)
    assert others == len(scores)
    assert relative(sums) > 0.1
    assert not sums.nonfinite
    assert choice(Routed(scores, right), right)[0].diff == 0.0


def test_scores_that_are_no_numbers():
    scores = draw(5)
    scores[0, 0] = math.nan
    sums, _ = choice(Routed(scores, (-scores).topk(2).indices), scores.topk(2).indices)
    assert sums.nonfinite > 0


def test_what_is_left_within_the_capacity():
    """Nothing for equal maps; one assignment's probability for one that is dropped instead."""
    probabilities = torch.tensor([[0.9, 0.0], [0.5, 0.0], [0.4, 1.0]])
    reference = torch.tensor([[1, 0], [1, 0], [0, 1]]).bool()
    sums, others = left(probabilities, reference, reference)
    assert (sums.diff, others) == (0.0, 0)
    ours = torch.tensor([[1, 0], [0, 0], [1, 1]]).bool()
    sums, others = left(probabilities, ours, reference)
    assert others == 2
    assert sums.diff == pytest.approx((0.4 - 0.5) ** 2 / 2)
    fewer = torch.tensor([[1, 0], [0, 0], [0, 1]]).bool()
    assert left(probabilities, fewer, reference)[0].diff == pytest.approx(0.5**2)


def test_rounding_within_the_capacity():
    """Probabilities that differ by rounding leave a regret of no more than that."""
    exact = torch.rand(50, 3, dtype=torch.float64)
    ours = exact + 1e-6 * torch.randn(50, 3, dtype=torch.float64)
    kept = [
        torch.zeros(50, 3).bool().scatter(0, one.topk(20, 0).indices, True) for one in (ours, exact)
    ]
    sums, _ = left(ours, *kept)
    assert sums.diff <= float((ours - exact).square().sum())
