# SPDX-License-Identifier: Apache-2.0
"""A user's step may run the model more often than it trains it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.capture.recorder import ExpertRecorder, Model, Recorder, batch, tapped


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("before_backward", [False, True])
def test_a_pass_without_gradients_is_no_microbatchs(recompute, before_backward):
    """A policy's earlier probabilities: such a pass is left alone, others are numbered alike."""
    model, sink = Model(recompute=recompute), Recorder()

    def aside():
        with torch.no_grad():
            model(batch(1)[0], labels=batch(1)[1])

    with tapped([model], sink, (3,)) as tap:
        aside()
        loss = model(batch()[0], labels=batch()[1])
        if before_backward:
            aside()
        loss.backward()
        aside()
    alone = Recorder()
    with tapped([model], alone, (3,)) as plain:
        model(batch()[0], labels=batch()[1]).backward()
    assert (tap.left_out, plain.left_out) == (True, False)
    assert sink.values.keys() == alone.values.keys()
    assert all(torch.equal(sink.values[place], alone.values[place]) for place in sink.values)


def test_more_passes_than_microbatches():
    """They are refused with what to do."""
    model, errors = Model(), []
    with tapped([model], Recorder(), errors=errors):
        for seed in range(3):
            model(batch(seed)[0], labels=batch(seed)[1])
    assert len(errors) == 1
    assert "join the samples of a microbatch" in str(errors[0])


class Router(torch.nn.Module):
    """Asks for a choice as Megatron's router does."""

    def __init__(self):
        super().__init__()
        self.router_replay, self.num_experts, self.topk = None, 3, 1

    def routing(self, scores):
        return self.router_replay.get_replay_topk(
            scores, 1, default_compute_topk=lambda s, k, *_: s.topk(k)
        )

    def forward(self, scores):
        return self.routing(scores)[0] * scores


class Twice(torch.nn.Module):
    """A router that runs twice, each time under a checkpoint of its own."""

    def __init__(self, reentrant):
        super().__init__()
        self.router, self.reentrant = Router(), reentrant

    def forward(self, scores):
        for _ in range(2):
            scores = checkpoint(self.router, scores, use_reentrant=self.reentrant)
        return scores


class Both(Recorder, ExpertRecorder):
    """Remembers tensors and choices."""

    def __init__(self):
        Recorder.__init__(self)
        ExpertRecorder.__init__(self)


@pytest.mark.parametrize(("reentrant", "again"), [(True, [1, 0]), (False, [None, None])])
def test_runs_of_a_router(reentrant, again):
    """Its choices are numbered; a recomputation repeats the last run first, if that is known."""
    model, sink = Twice(reentrant), Both()
    with tapped([model], sink):
        model(torch.rand(4, 3, requires_grad=True)).sum().backward()
    assert [routed.run for _, _, routed in sink.routes] == [0, 1, *again]
