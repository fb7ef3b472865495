# SPDX-License-Identifier: Apache-2.0
"""A user's step may run the model more often than it trains it."""

import pytest
import torch

from tests.capture.recorder import Model, Recorder, batch, tapped


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
