# SPDX-License-Identifier: Apache-2.0
"""What ranks loaded, against one device's load: weights, main weights, and what that lacks."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.capture import state
from megatron_ttrace.mcore.checkpoints.loading import Source
from megatron_ttrace.mcore.optimizer import Owned
from megatron_ttrace.mcore.parameters import place_parameter
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run.start import loaded
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.records import LoadedIndex
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal

SOURCE = Source("there", 3, "torch_dist", "")


@pytest.fixture
def model(monkeypatch):
    """A layer in bfloat16 whose optimizer has main weights."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 2).bfloat16()
    adam = torch.optim.Adam([torch.zeros(1)])
    owned = {
        one: Owned(one.data.float() + 1e-5, adam, adam.param_groups[0])
        for one in layer.parameters()
    }
    places = [
        (one, place_parameter(name, one, SINGLE, gated=False))
        for name, one in layer.named_parameters()
    ]
    for module in (loaded, state):
        monkeypatch.setattr(module, "owned_by", lambda optimizer: owned)
    return SimpleNamespace(
        optimizer=None,
        chunks=[layer],
        owned=owned,
        mesh=SINGLE,
        places=lambda: places,
        held=lambda: [(one, place, one.data) for one, place in places],
        buffers=list,
    )


class Sink:
    """Whether each tensor is bitwise what the reference has."""

    def __init__(self, reference):
        self._reference = {(key.name, key.index): reference.data(key) for key in reference}
        self.found = {}

    def placed(self, place, data, logical_shape, placement):
        """Compare."""
        *_, name, index = place
        self.found[name, index] = torch.equal(data, self._reference[name, index])


def compared(model, directory, monkeypatch, load):
    """What every tensor of the candidate is, and the notice."""
    monkeypatch.setattr(loaded, "load_weights", load)
    weights = {one: one.data.clone() for one, _ in model.places()}
    device = loaded.OneDevice(SOURCE, model, SimpleNamespace())
    for one, weight in weights.items():
        one.data.copy_(weight)
    writer = TraceWriter(directory, 0)
    device.write(writer, 1)
    writer.close()
    seal(directory, ReferenceMeta(loaded=device.unverified).to_json())
    reference = TraceReader(directory)
    sink = Sink(reference)
    loaded.compare(model, reference, 1, sink)
    return sink.found, loaded.notice(reference)


def test_what_one_device_loads_is_equal(model, tmp_path, monkeypatch):
    """Weights, and main weights that round to them."""
    found, notice = compared(model, tmp_path, monkeypatch, lambda *_: "")
    assert set(found) == {(name, index) for name in ("weight", "bias") for index in (0, 1)}
    assert all(found.values())
    assert not notice


def test_shifted_main_weights(model, tmp_path, monkeypatch):
    """The weights are right."""
    main = model.owned[model.chunks[0].weight].main
    main.copy_(main.flatten().roll(1).view_as(main))
    found, _ = compared(model, tmp_path, monkeypatch, lambda *_: "")
    assert [key for key, equal in found.items() if not equal] == [("weight", LoadedIndex.ROUNDED)]


def test_other_weights(model, tmp_path, monkeypatch):
    """One device loads something else."""

    def load(source, chunks, weights, args):
        weights[0].add_(1.0)
        return ""

    found, _ = compared(model, tmp_path, monkeypatch, load)
    wrong = [key for key, equal in found.items() if not equal]
    assert wrong == [("weight", LoadedIndex.ONE_DEVICE), ("weight", LoadedIndex.ROUNDED)]


@pytest.mark.parametrize("refuses", [True, False])
def test_what_one_device_cannot_load(model, tmp_path, monkeypatch, refuses):
    """All of it, or a weight that the checkpoint lacks: ranks and main weights must agree."""

    def load(source, chunks, weights, args):
        weights[1].fill_(math.nan)
        return "Megatron: no" if refuses else ""

    found, notice = compared(model, tmp_path, monkeypatch, load)
    weight = LoadedIndex.AGREED if refuses else LoadedIndex.ONE_DEVICE
    assert set(found) == {
        *(("weight", index) for index in (weight, LoadedIndex.ROUNDED)),
        *(("bias", index) for index in (LoadedIndex.AGREED, LoadedIndex.ROUNDED)),
    }
    assert all(found.values())
    assert ("Megatron: no" if refuses else "bias") in notice
