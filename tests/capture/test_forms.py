# SPDX-License-Identifier: Apache-2.0
"""Tensors of other forms between a fork's modules: in dataclasses, complex, mapped over samples."""

import dataclasses

import pytest
import torch
from torch import nn

from megatron_ttrace.capture.modules import tensors_in
from megatron_ttrace.trace.records import Kind
from tests.capture.recorder import Recorder, tapped
from tests.capture.test_modules import GRADIENTS, Function, leaf


@dataclasses.dataclass
class Pair:
    """What a fork's modules give to each other."""

    x: torch.Tensor
    gate: torch.Tensor | None = None
    bounds: torch.Tensor | None = None


def test_tensors_in_a_dataclass_come_after_all_others():
    """Also those of an argument in between, so that no position moves; whole numbers are left."""
    first = Pair(torch.ones(1), None, torch.arange(3))
    given = (torch.zeros(1), first, None, [torch.zeros(2)], Pair(torch.ones(2), torch.ones(3)))
    found = {position: tuple(tensor.shape) for position, tensor in tensors_in(given)}
    assert found == {0: (1,), 3: (2,), 5: (1,), 8: (2,), 9: (3,)}


def test_a_dataclass_between_modules():
    """Its tensors are an output of the one and inputs of the other, with gradients."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Function(lambda _, x: Pair(x, torch.sigmoid(x)))
            self.second = Function(lambda _, pair: pair.x * pair.gate)

        def forward(self, x):
            return self.second(self.first(x))

    sink = Recorder()
    with tapped([model := Two()], sink):
        model(leaf(1)).sum().backward()
    for kind, name in ((Kind.OUTPUT, "first"), (Kind.INPUT, "second")):
        assert {place[3] for place in sink.values if place[1:3] == (kind, name)} == {1, 2}
    gradients = [place[1:] for place in sink.values if place[1] in GRADIENTS]
    assert (Kind.GRAD_OUTPUT, "first", 2) in gradients
    assert (Kind.GRAD_INPUT, "second", 1) in gradients


@pytest.mark.parametrize("isolated", [False, True])
def test_complex_numbers(isolated):
    """They are handed over as pairs, which may be replaced; training has what it had."""

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.spectrum = Function(lambda _, x: torch.fft.rfft(x).conj())
            self.back = Function(lambda _, z: torch.fft.irfft(z.conj()))

        def forward(self, x):
            return self.back(self.spectrum(x))

    model, x, sink = Mixer(), torch.randn(2, 4, requires_grad=True), Recorder()
    place, back = ((0, kind, "spectrum", 0) for kind in (Kind.OUTPUT, Kind.GRAD_OUTPUT))
    expected = torch.view_as_real(torch.fft.rfft(x.detach()).conj().resolve_conj())
    if isolated:
        sink.instead = {place: 2 * expected, back: torch.ones(2, 3, 2)}
    with tapped([model], sink):
        y = model(x)
        y.sum().backward()
    assert torch.equal(sink.values[place], expected)
    assert sink.values[back].shape == (2, 3, 2)
    assert torch.allclose(y, x * (1 + isolated), atol=1e-6)
    assert torch.isfinite(x.grad).all()


def test_within_a_map_over_samples():
    """What a module sees there is no plain tensor; what contains it is compared."""

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return torch.func.vmap(self.inner)(x)

    sink, errors = Recorder(), []
    with tapped([model := Mapped()], sink, errors=errors):
        model(leaf(3, 4)).sum().backward()
    assert not errors
    assert {place[2] for place in sink.values} == {"model"}
