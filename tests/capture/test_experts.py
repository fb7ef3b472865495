# SPDX-License-Identifier: Apache-2.0
"""Following tokens through a dispatcher, and replaying a router's choice."""

import types

import pytest
import torch

from megatron_ttrace.capture.experts import DispatchTap, RouterTap, SelectionTap, can_follow
from megatron_ttrace.trace.captured import Groups
from tests.capture.recorder import ExpertRecorder

MICROBATCH, TOKENS, SAMPLES = 3, 4, 2


class Dispatcher:
    """Sorts tokens by expert, as Megatron's do on one rank; keeps state, as they do."""

    def __init__(self):
        self.shared_experts = "kept"
        self.shapes = []
        self.config = types.SimpleNamespace(moe_router_padding_for_quantization=False)

    def dispatch_preprocess(self, hidden, routing, probs):
        self.routing = routing
        self.shapes.append(tuple(hidden.shape))
        return hidden.reshape(-1, hidden.shape[-1]), probs

    def token_dispatch(self, hidden, probs):
        return hidden, probs

    def dispatch_postprocess(self, hidden, probs):
        where = self.routing.T.nonzero()
        pad = torch.zeros(1, hidden.shape[-1])
        counts = self.routing.sum(0)
        counts[-1] += 1
        return torch.cat([hidden[where[:, 1]], pad]), counts, probs

    def run(self, hidden, routing, probs):
        return self.dispatch_postprocess(
            *self.token_dispatch(*self.dispatch_preprocess(hidden, routing, probs))
        )


@pytest.fixture
def layer():
    """A layer of experts 4 and 5."""
    return types.SimpleNamespace(token_dispatcher=Dispatcher(), local_expert_indices=[4, 5])


@pytest.mark.parametrize("name", ["MoEAlltoAllTokenDispatcher", "MoEAllGatherTokenDispatcher"])
def test_dispatchers_that_are_followed(layer, name):
    """Also one that a fork derives from Megatron's."""
    assert not can_follow(layer)
    assert not can_follow(torch.nn.Linear(1, 1))
    layer.token_dispatcher = type("ForksDispatcher", (type(name, (Dispatcher,), {}),), {})()
    assert can_follow(layer)


def test_rows_are_named(layer):
    """Each row by its microbatch, position and expert; padding by nobody."""
    sink = ExpertRecorder()
    tap = DispatchTap(layer, sink.follow("mlp.experts"))
    routing = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]] * SAMPLES).bool()
    hidden = torch.randn(TOKENS, SAMPLES, 6)
    rows, _, _ = layer.token_dispatcher.run(hidden, routing, torch.ones(8, 2))
    ((microbatch, name, index),) = sink.dispatches
    assert (microbatch, name) == (MICROBATCH, "mlp.experts")
    assert index.position[:-1].tolist() == [100, 102, 104, 106, 101, 102, 105, 106]
    assert index.microbatch.tolist() == [MICROBATCH] * 8 + [-1]
    assert index.expert.tolist() == [4] * 4 + [5] * 5
    flat = hidden.reshape(-1, 6)
    for row, position in zip(rows[:-1], index.position[:-1], strict=True):
        assert torch.equal(row, flat[position - 100])
    tap.remove()


class Padding(Dispatcher):
    """Gives the last expert also the first token that did not choose it, in place."""

    def __init__(self):
        super().__init__()
        self.config.moe_router_padding_for_quantization = True

    def dispatch_preprocess(self, hidden, routing, probs):
        last = routing[:, -1]
        last[int((~last).nonzero()[0])] = True
        return super().dispatch_preprocess(hidden, routing, probs)

    def dispatch_postprocess(self, hidden, probs):
        rows, counts, _ = super().dispatch_postprocess(hidden, probs)
        where = self.routing.T.nonzero()
        return rows[:-1], counts - torch.tensor([0, 1]), probs[where[:, 1], where[:, 0]]


def test_tokens_that_fill_up_an_expert(layer):
    """They are padding, and their gradient does not reach the router's probabilities."""
    layer.token_dispatcher = Padding()
    sink = ExpertRecorder()
    DispatchTap(layer, sink.follow("mlp.experts"))
    routing = torch.tensor([[1, 0], [0, 1], [1, 1], [1, 0]] * SAMPLES).bool()
    probs = routing.float().requires_grad_()
    hidden = torch.randn(TOKENS, SAMPLES, 6)
    _, counts, weights = layer.token_dispatcher.run(hidden, routing.clone(), probs)
    ((_, _, index),) = sink.dispatches
    assert counts.tolist() == [6, 5]
    assert index.expert.tolist() == [4] * 6 + [5] * 5
    assert (index.microbatch == -1).nonzero()[0].tolist() == [6]
    weights.sum().backward()
    assert torch.equal(probs.grad, routing.float())


def test_names_that_nobody_sent(layer):
    """Memory that was never written is a token that the reference does not have."""
    sink = ExpertRecorder()
    steps = Dispatcher.dispatch_postprocess

    def forgetful(self, hidden, probs):
        rows, counts, probs = steps(self, hidden, probs)
        rows[:3, 0] = torch.tensor([float("nan"), -1.5e30, float("inf")])
        return rows, counts, probs

    layer.token_dispatcher.__class__ = type(
        "Forgetful", (Dispatcher,), {"dispatch_postprocess": forgetful}
    )
    DispatchTap(layer, sink.follow("mlp.experts"))
    hidden = torch.randn(TOKENS, SAMPLES, 6)
    layer.token_dispatcher.run(hidden, torch.ones(8, 2).bool(), torch.ones(8, 2))
    ((_, _, index),) = sink.dispatches
    assert index.microbatches == [MICROBATCH]
    assert (index.position[:4] == [1 << 24, 1 << 24, 1 << 24, 103]).all()


def test_the_dispatcher_keeps_its_state(layer):
    """What the backward pass and the way back need is untouched by the second walk."""
    tap = DispatchTap(layer, ExpertRecorder().follow("mlp.experts"))
    dispatcher = layer.token_dispatcher
    routing = torch.ones(8, 2).bool()
    dispatcher.run(torch.randn(TOKENS, SAMPLES, 6), routing, torch.ones(8, 2))
    assert dispatcher.shared_experts == "kept"
    assert dispatcher.routing is routing
    tap.remove()
    assert "dispatch_preprocess" not in vars(dispatcher)
    dispatcher.run(torch.randn(TOKENS, SAMPLES, 6), routing, torch.ones(8, 2))


def test_a_choice_is_replaced():
    """The reference's experts, with this run's scores and their gradients."""
    router = types.SimpleNamespace(router_replay=None)
    sink = ExpertRecorder(instead=torch.tensor([[2], [0]]))
    tap = RouterTap(router, sink.follow("mlp.router"))
    scores = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]], requires_grad=True)
    values, chosen = router.router_replay.get_replay_topk(
        scores, 1, default_compute_topk=lambda s, k, *_: s.topk(k)
    )
    assert chosen.tolist() == [[2], [0]]
    values.sum().backward()
    assert scores.grad.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert sink.routes[0][2].chosen.tolist() == [[0], [1]]
    assert sink.routes[0][2].groups is None
    tap.remove()
    assert router.router_replay is None


def test_what_the_job_replays_is_its_choice():
    """Experts that were recorded before, as a rollout's."""

    class Recorded:
        def get_replay_topk(self, scores, *_, default_compute_topk):
            assert default_compute_topk is torch.topk
            chosen = scores.argmin(dim=1, keepdim=True)
            return scores.gather(1, chosen), chosen

    router = types.SimpleNamespace(router_replay=Recorded())
    sink = ExpertRecorder()
    tap = RouterTap(router, sink.follow("mlp.router"))
    scores = torch.tensor([[0.5, 0.2, 0.3]])
    replayed = router.router_replay.get_replay_topk(scores, 1, None, None, torch.topk)
    assert [each.tolist() for each in replayed] == [[[scores[0, 1].item()]], [[1]]]
    assert sink.routes[0][2].chosen.tolist() == [[1]]
    tap.remove()
    assert isinstance(router.router_replay, Recorded)


def test_a_choice_is_left_alone_where_there_is_no_other():
    """As in the reference's first run; groups are passed on."""
    router = types.SimpleNamespace(router_replay=None)
    sink = ExpertRecorder()
    RouterTap(router, sink.follow("mlp.router"))
    scores = torch.rand(2, 4)
    values, chosen = router.router_replay.get_replay_topk(
        scores, 2, num_groups=2, group_topk=1, default_compute_topk=lambda s, k, *_: s.topk(k)
    )
    assert torch.equal(values, scores.topk(2).values)
    assert torch.equal(chosen, scores.topk(2).indices)
    assert sink.routes[0][2].groups == Groups(2, 1)


class DSAttention(torch.nn.Module):
    """Selects keys as Megatron's does."""

    def forward(self, scores, **kwargs):
        return fused_qk_topk_naive(scores, **kwargs)


def fused_qk_topk_naive(scores, key_positions=None):
    """The best two of [samples, tokens, keys]; -1 where there are not so many."""
    values, chosen = scores.topk(2, dim=-1)
    return scores, chosen.masked_fill(values.isinf(), -1)


@pytest.mark.parametrize("kind", [DSAttention, type("Heir", (DSAttention,), {})])
def test_a_selection_of_keys_is_replaced(kind):
    """By token, as the reference's is stored; a token without a choice keeps all keys it has."""
    attention = kind()
    sink = ExpertRecorder(instead=torch.tensor([[2, 0]] * TOKENS * SAMPLES))
    tap = SelectionTap(attention, sink.follow("core_attention"))
    scores = torch.rand(SAMPLES, TOKENS, 3)
    scores[:, 0, 1:] = -torch.inf
    same, chosen = attention(scores)
    assert same is scores
    assert chosen[:, 0].tolist() == [[0, -1]] * SAMPLES
    assert (chosen[:, 1:] == torch.tensor([2, 0])).all()
    ((_, _, routed),) = sink.routes
    assert torch.equal(routed.chosen.view(TOKENS, SAMPLES, 2)[1], scores.topk(2).indices[:, 1])
    assert routed.scores.isfinite().all()
    attention(scores, key_positions=torch.tensor([0, 2, 1]))  # not the order of the sequence
    attention(scores[..., :2])  # no choice
    assert len(sink.routes) == 1
    tap.remove()
    assert torch.equal(attention(scores)[1], fused_qk_topk_naive(scores)[1])


def test_names_travel_also_from_a_rank_whose_tracing_failed(layer):
    """The dispatch is a collective: the other ranks wait for this one."""
    sink = ExpertRecorder()
    tap = DispatchTap(layer, sink.follow("mlp.experts", broken=True))
    layer.token_dispatcher.run(
        torch.randn(TOKENS, SAMPLES, 6), torch.ones(8, 2).bool(), torch.ones(8, 2)
    )
    assert layer.token_dispatcher.shapes == [(TOKENS, SAMPLES, 6), (TOKENS, SAMPLES, 2)]
    assert sink.dispatches == []
    tap.remove()
