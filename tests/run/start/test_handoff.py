# SPDX-License-Identifier: Apache-2.0
"""A loaded start is restored as it was written: parameters, buffers, Adam's moments, its step."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.mcore.sharded_weights import WeightPart
from megatron_ttrace.run.start import handoff
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.store import TraceReader, seal
from tests.capture.stepped import stepped
from tests.placement.meshes import mesh_of


def trained(monkeypatch: pytest.MonkeyPatch, seed: int, width: int = 3) -> SimpleNamespace:
    """A linear layer after one step of Adam, as a rank's model with its optimizer."""
    torch.manual_seed(seed)
    layer = torch.nn.Linear(2, width)
    return stepped(monkeypatch, layer, [one.data for one in layer.parameters()], handoff)


def test_each_rank_writes_the_layers_that_it_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a layer-wise optimizer: also one that is not the first, and no others."""
    model = trained(monkeypatch, 1)
    model.mesh = mesh_of(1, 2)
    weight, bias = model.optimizer.owned
    del model.optimizer.owned[bias]
    model.optimizer.dp_cp_params_list = [[bias], [weight]]
    handoff.write(model, tmp_path)
    seal(tmp_path, {"role": "start"})
    assert {entry.key.name for entry in TraceReader(tmp_path).ranks[1]} == {"weight"}


def test_ranks_that_step_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have the same number of steps: what they restore depends on it."""
    monkeypatch.setattr(handoff.loading, "source_of", lambda args: None)
    args = SimpleNamespace(iteration=3, consumed_train_samples=12)
    written: list[object] = []

    def exchange(task: str, value: Callable[[], object]) -> list[object]:
        written.append(value())
        return written

    ranks = SimpleNamespace(rank=0, exchange=exchange, from_one=lambda *_: None)
    started = []
    for rank in (0, 1):
        model = trained(monkeypatch, 1)
        model.mesh = mesh_of(rank, 2, pp=2)
        if rank:
            model.optimizer.owned.clear()
        scheduler = SimpleNamespace(num_steps=3)
        started.append(handoff.hand_over(model, tmp_path, args, scheduler, ranks))
    assert [start.step for start in started] == [1.0, 1.0]


def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model has the same state afterwards, bitwise."""
    first = trained(monkeypatch, 1)
    handoff.write(first, tmp_path)
    seal(tmp_path, {"role": "start"})
    second = trained(monkeypatch, 2)
    handoff.restore(second, tmp_path, 7.0)
    for (restored, _), (written, _) in zip(second.places(), first.places(), strict=True):
        assert torch.equal(restored, written)
        restored_state, written_state = (
            second.optimizer.owned[restored].state,
            first.optimizer.owned[written].state,
        )
        assert torch.equal(restored_state["exp_avg"], written_state["exp_avg"])
        assert torch.equal(restored_state["exp_avg_sq"], written_state["exp_avg_sq"])
        assert float(restored_state["step"]) == 7.0
    assert handoff.steps_of(second) == 7.0
    assert torch.equal(second.buffers()[0][1], first.buffers()[0][1])


def test_large_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork's buffer, as factors of a hash; float32 has room for none of them."""
    models = [trained(monkeypatch, seed) for seed in (1, 2)]
    for number, model in enumerate(models):
        value = torch.tensor([2**53 + 1, 2**24 + 1 + number])
        buffer = (ParameterPlace("factors", (2,), ()), value)
        monkeypatch.setattr(model, "buffers", lambda buffer=buffer: [buffer])
    handoff.write(models[0], tmp_path)
    seal(tmp_path, {"role": "start"})
    handoff.restore(models[1], tmp_path, None)
    assert models[1].buffers()[0][1].tolist() == [2**53 + 1, 2**24 + 1]


def test_a_sharded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FSDP the rank's part of a parameter is filled, not the sharded tensor."""
    first, second = trained(monkeypatch, 1), trained(monkeypatch, 2)
    handoff.write(first, tmp_path)
    seal(tmp_path, {"role": "start"})
    second.optimizer.owned.clear()
    parameter, place = second.places()[0]
    rows, before = torch.zeros(parameter.numel() // 2), parameter.detach().clone()
    part = WeightPart(rows, (0, len(rows)), rows, (0, len(rows)))
    monkeypatch.setattr(handoff, "parts_of", lambda chunks: {parameter: part})
    handoff.restore(second, tmp_path, None)
    original = {at.name: value for value, at in first.places()}[place.name]
    assert torch.equal(rows, original.flatten()[: len(rows)])
    assert torch.equal(parameter, before)


def test_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of another shape is refused by name."""
    handoff.write(trained(monkeypatch, 1), tmp_path)
    seal(tmp_path, {"role": "start"})
    with pytest.raises(TTraceError, match=r"has no weight of this shape"):
        handoff.restore(trained(monkeypatch, 2, width=5), tmp_path, 7.0)
