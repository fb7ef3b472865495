# SPDX-License-Identifier: Apache-2.0
"""The reference's choice of experts where Megatron's interface for replaying is not asked."""

import types

import pytest
import torch

from megatron_ttrace.capture.balancing import BalancingTap, OwnRouterTap, TopK
from megatron_ttrace.capture.experts import RouterTap
from tests.capture.recorder import ExpertRecorder

TOKENS, EXPERTS = 6, 4


# As ``TopKRouter`` and the functions of its module are.


def sinkhorn(cost):
    """Something that depends on all tokens."""
    return torch.exp(cost) / torch.exp(cost).sum(0)


def topk_routing_with_score_function(
    logits, topk, fused=False, router_replay=None, precomputed_indices=None
):
    """Probabilities and a map of the best experts; the fused form cannot be told which."""
    if fused:
        indices = logits.topk(topk, dim=1).indices
        values = logits.gather(1, indices)
    elif precomputed_indices is not None:
        indices = precomputed_indices
        values = logits.gather(1, indices)
    else:
        values, indices = router_replay.get_replay_topk(
            logits, topk, None, None, lambda scores, topk, *_: scores.topk(topk, dim=1)
        )
    probabilities = torch.zeros_like(logits).scatter(1, indices, values.softmax(-1))
    return probabilities, torch.zeros_like(logits).bool().scatter(1, indices, True)


def apply_router_token_dropping(
    probabilities, routing_map, capacity_factor=1.0, pad_to_capacity=False
):
    """Each expert keeps its best tokens."""
    capacity = min(int(capacity_factor * TOKENS / EXPERTS), TOKENS)
    best = probabilities.topk(capacity, dim=0).indices
    kept = torch.zeros_like(routing_map).scatter(0, best, True)
    kept = kept if pad_to_capacity else routing_map & kept
    return probabilities * kept, kept


class Router:
    """Routes in one of six ways."""

    def __init__(self, how, topk=1):
        self.how, self.topk, self.num_experts = how, topk, EXPERTS
        self.qb_beta = torch.zeros(EXPERTS)
        self.router_replay = None

    def routing(self, logits, padding_mask=None):
        if self.how == "sinkhorn":
            chosen = sinkhorn(logits.detach()).topk(self.topk, dim=1).indices
            routing_map = torch.zeros_like(logits).bool().scatter(1, chosen, True)
            return torch.sigmoid(logits) * routing_map, routing_map
        if self.how == "by torch":
            values, indices = torch.topk(logits, self.topk + 1, dim=1)
            best = values[:, : self.topk].softmax(-1)
            probabilities = torch.zeros_like(logits).scatter(1, indices[:, : self.topk], best)
            logits.topk(self.topk, dim=1)  # what a loss counts is not what is routed
            return probabilities, probabilities > 0
        if self.how == "replayed":
            replay = self.router_replay
            return topk_routing_with_score_function(logits, self.topk, router_replay=replay)
        if self.how == "chosen before":
            best = logits.topk(self.topk, dim=1).indices
            return topk_routing_with_score_function(logits, self.topk, precomputed_indices=best)
        found = topk_routing_with_score_function(logits, self.topk, fused=True)
        return apply_router_token_dropping(*found) if self.how == "dropping" else found


def tapped(how, sink, topk=1):
    router = Router(how, topk)
    return router, BalancingTap(router, sink.follow("mlp.router"))


@pytest.fixture
def logits():
    """Of six tokens."""
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", ["sinkhorn", "by torch", "chosen before", "fused", "dropping"])
def test_nothing_is_changed_without_need(logits, how):
    """A sink that asks for nothing, and one that asks for what was chosen, see the same run."""
    expected = Router(how).routing(logits)
    sink = ExpertRecorder()
    router, tap = tapped(how, sink)
    assert all(map(torch.equal, router.routing(logits), expected))
    ((microbatch, name, routed),) = sink.routes
    assert (microbatch, name) == (3, "mlp.router")
    kept = expected[1] if how == "dropping" else None
    same = tapped(how, ExpertRecorder(routed.chosen, kept))[0]
    assert all(map(torch.equal, same.routing(logits), expected))
    tap.remove()
    assert "routing" not in vars(router)


@pytest.mark.parametrize("how", ["sinkhorn", "by torch", "chosen before", "fused"])
def test_another_choice(logits, how):
    """The reference's experts are chosen, with the candidate's own probabilities of them."""
    instead = (logits.argmin(dim=1, keepdim=True)).clone()
    probabilities, routing_map = tapped(how, ExpertRecorder(instead))[0].routing(logits)
    assert torch.equal(routing_map.nonzero()[:, 1], instead[:, 0])
    expected = torch.sigmoid(logits) if how == "sinkhorn" else torch.ones_like(logits)
    torch.testing.assert_close(probabilities, expected * routing_map)


def test_a_choice_that_is_replayed_is_asked_for_once(logits):
    router, sink = Router("replayed"), ExpertRecorder()
    RouterTap(router, sink.follow("mlp.router"))
    BalancingTap(router, sink.follow("mlp.router"))
    for calls in (1, 2):
        router.routing(logits)
        assert len(sink.routes) == calls


def test_a_router_that_is_not_megatrons(logits):
    """It has no interface for replaying; its first top-k over experts is its choice."""

    class Own(torch.nn.Module):
        def forward(self, logits):
            logits.view(TOKENS, 2, 2).topk(1, dim=-1)  # of groups
            logits.topk(2, dim=0)  # of tokens
            torch.topk(logits, 1, -1, False)  # of the worst
            return torch.topk(input=logits, k=1)

    router, instead = Own(), logits.argmin(dim=1, keepdim=True)
    config = types.SimpleNamespace(num_moe_experts=EXPERTS, moe_router_topk=1)
    dispatcher = types.SimpleNamespace(config=config)
    layer = types.SimpleNamespace(router=router, token_dispatcher=dispatcher)
    sink = ExpertRecorder(instead)
    tap = OwnRouterTap(layer, sink.follow("mlp.router"))
    found = router(logits)
    assert torch.equal(found.indices, instead)
    assert torch.equal(found.values, logits.gather(1, instead))
    ((_, _, routed),) = sink.routes
    assert torch.equal(routed.chosen, logits.argmax(dim=1, keepdim=True))
    tap.remove()
    assert torch.equal(router(logits).indices, routed.chosen)


@pytest.mark.parametrize(
    "best",
    [
        lambda logits: logits.argmax(dim=-1),
        lambda logits: torch.max(logits, 1).indices,
        lambda logits: torch.argmax(logits, 1, True).squeeze(1),
        lambda logits: logits.max(dim=1, keepdim=True)[1].squeeze(1),
    ],
)
def test_one_expert_may_be_chosen_by_max(logits, best):
    instead = logits.argmin(dim=1)
    sink = ExpertRecorder(instead.unsqueeze(1))
    with TopK(sink.follow("mlp.router"), EXPERTS, 1):
        logits.max(), logits.argmax(), torch.max(logits, logits), logits.argmax(dim=0)
        assert torch.equal(best(logits), instead)
        assert torch.equal(best(logits), logits.argmax(dim=1)), "the first alone is the choice"
    ((_, _, routed),) = sink.routes
    assert torch.equal(routed.chosen, logits.argmax(dim=1, keepdim=True))


def test_sinkhorn_is_judged_by_what_it_maximises(logits):
    """The scores are the router's, the choice is the largest of what the sink judges it by."""
    sink = ExpertRecorder()
    tapped("sinkhorn", sink)[0].routing(logits)
    ((_, _, routed),) = sink.routes
    assert torch.equal(routed.scores, logits)
    assert torch.equal(routed.by.argmax(dim=1), routed.chosen[:, 0])
    # One number per expert apart from the scores, once the mean of each token is taken off.
    shift = routed.by - (logits - logits.mean(dim=1, keepdim=True))
    torch.testing.assert_close(shift, shift[:1].expand_as(shift))


def test_other_tokens_are_left(logits):
    """What is left of the choice is the reference's, whatever the capacity is."""
    kept = torch.zeros(TOKENS, EXPERTS).bool()
    kept[:, 1] = True
    sink = ExpertRecorder(kept=kept)
    probabilities, found = tapped("dropping", sink)[0].routing(logits)
    assert torch.equal(found, kept)
    ((before, own),) = sink.drops
    assert not torch.equal(own, kept)
    torch.testing.assert_close(probabilities, before * kept)


def test_routing_of_a_router_of_its_own(logits):
    """The job's, and not the class's; it is there afterwards."""
    router, sink = Router("fused"), ExpertRecorder()
    router.routing = own = lambda logits: Router.routing(router, -logits)
    tap = BalancingTap(router, sink.follow("mlp.router"))
    assert all(map(torch.equal, router.routing(logits), own(logits)))
    assert torch.equal(sink.routes[0][2].scores, -logits)
    tap.remove()
    assert router.routing is own


def test_the_module_is_put_back(logits):
    """Also after an error."""

    class FailingSink(ExpertRecorder):
        def routed(self, *args, **kwargs):
            raise RuntimeError("no")

    before = sinkhorn
    router, _ = tapped("sinkhorn", FailingSink())
    with pytest.raises(RuntimeError):
        router.routing(logits)
    assert globals()["sinkhorn"] is before
