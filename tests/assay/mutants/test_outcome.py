# SPDX-License-Identifier: Apache-2.0
"""What training ends with, to the bit."""

import types

import pytest
import torch

from tests.assay.mutants import outcome


def told(monkeypatch: pytest.MonkeyPatch, change: float = 0.0, line: str = "lm loss: 5") -> list:
    """Watch a training that is set up, takes a step and logs a line."""
    from megatron.training import training

    torch.manual_seed(1)
    model = torch.nn.BatchNorm1d(3)
    inner = torch.optim.Adam(model.parameters())
    made = [model], types.SimpleNamespace(optimizer=inner), None
    monkeypatch.setattr(training, "setup_model_and_optimizer", lambda: made)
    monkeypatch.setattr(training, "print_rank_last", lambda message: None)
    read = outcome.watch()
    training.setup_model_and_optimizer()
    model(torch.rand(5, 3)).square().sum().backward()
    inner.step()
    next(iter(inner.state.values()))["exp_avg_sq"][0] += change
    training.print_rank_last(f" [2026-11-22 08:00:00] iteration 1 | elapsed time: 3.2 | {line} |")
    return read()


def test_the_same(monkeypatch):
    """Parameters, buffers, moments and numbers of the log, not the time."""
    first = told(monkeypatch)
    assert first == told(monkeypatch)
    assert len(first) == 2 + 3 + 2 * (1 + 3) + 1
    assert first[-1] == "lm loss: 5"


@pytest.mark.parametrize("changes", [{"change": 1e-3}, {"line": "lm loss: 6"}])
def test_another(monkeypatch, changes):
    """A moment of one element, a logged number."""
    assert told(monkeypatch) != told(monkeypatch, **changes)
