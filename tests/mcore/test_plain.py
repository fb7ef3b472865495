# SPDX-License-Identifier: Apache-2.0
"""What a fork counts and keeps in attributes and global variables is put back."""

import argparse
import random
import sys
import types
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ttrace.mcore import plain
from megatron_ttrace.mcore.plain import PlainState
from megatron_ttrace.trace.copies import Copies

COUNT = 3


class Layer(torch.nn.Module):
    """Keeps what layers of forks keep."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.first, self.mean = 0, True, torch.zeros(2)
        self.norms: deque[float] = deque([1.0])
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self) -> None:
        """A step."""
        self.calls += 1
        self.first = False
        self.mean.add_(1.0)
        self.norms.append(2.0)
        self.cached = torch.ones(3)


def test_numbers_containers_and_tensors_are_put_back_where_they_are() -> None:
    """A flag and a cache that a step made show in the next one; at the end they are gone, too."""
    layer = Layer()
    mean, norms = layer.mean, layer.norms
    state = PlainState([torch.nn.Sequential(layer)], ())
    for whole in (False, True):
        layer()
        layer()
        state.restore(whole=whole)
        assert (layer.calls, layer.mean, layer.norms) == (0, mean, norms)
        assert mean.tolist() == [0.0, 0.0]
        assert list(norms) == [1.0]
        assert layer.first == whole
        assert hasattr(layer, "cached") != whole


def hook(layer: Layer) -> None:
    """Registered once."""
    layer.weight.register_hook(lambda gradient: gradient)


def module(layer: Layer) -> None:
    """Made once."""
    layer.group = object()  # type: ignore[assignment]


@pytest.mark.parametrize("make", [hook, module])
def test_a_flag_stays_that_says_what_there_is(make: Any) -> None:
    """Otherwise it would be made a second time."""
    layer = Layer()
    state = PlainState([layer], ())
    layer()
    make(layer)
    state.restore(whole=True)
    assert not layer.first
    assert layer.calls == 0


def test_others_and_global_variables() -> None:
    """Of an optimizer, a schedule and the user's own code the numbers."""
    global COUNT
    schedule = types.SimpleNamespace(steps=1, history=[1], begun=False)
    state = PlainState([], [schedule])
    COUNT = schedule.steps = 5
    schedule.begun = True
    schedule.history.append(2)
    state.restore(whole=True)
    assert COUNT == 3
    assert vars(schedule) == {"steps": 1, "history": [1], "begun": True}


class Library:
    """Of C functions, which are all that it has."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(f"Unknown C global variable {name!r}")


def test_what_has_no_class() -> None:
    owner = types.SimpleNamespace(library=Library(), libraries=[Library()], calls=1)
    state = PlainState([], [owner])
    owner.calls = 2
    state.restore()
    assert owner.calls == 1


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(plain._LARGEST + 1), torch.ones(plain._LARGEST + 1)),
        ({"a": object()}, {"b": object()}),
        (None, object()),
        (1, True),
    ],
)
def test_what_is_not_alike_stays(before: Any, now: Any) -> None:
    """A table that has grown, what is large, objects."""
    owner = types.SimpleNamespace(value=before)
    state = PlainState([], [owner])
    owner.value = now
    state.restore()
    assert owner.value is now


class Meter:
    """Of the user's."""

    count = 0


def test_an_object_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module counts in it; not what Megatron's classes hold."""
    layer: Any = Layer()
    layer.meter, layer.other = Meter(), Meter()
    layer.other.__class__ = type("Config", (), {"__module__": "megatron.config"})
    layer.other.count = 1
    monkeypatch.setitem(sys.modules, "megatron.config", types.ModuleType("megatron.config"))
    vars(sys.modules["megatron.config"])["__file__"] = "/home/me/megatron/config.py"
    state = PlainState([torch.nn.Sequential(layer)], ())
    layer.meter.count = layer.other.count = 2
    state.restore(whole=True)
    assert (layer.meter.count, layer.other.count) == (0, 2)


class Average:
    """Of weights, as a fork keeps it."""

    def __init__(self) -> None:
        self.shadow, self.updates = {"a": torch.zeros(plain._LARGEST + 1)}, 0
        self.module = torch.nn.Linear(2, 2)

    def update(self) -> None:
        """After a step."""
        self.shadow = {"a": self.shadow["a"] + 1, "b": torch.ones(2)}
        self.updates += 1
        for weight in self.module.parameters():
            weight.data.add_(1.0)


AVERAGE = Average()
WEIGHT = torch.nn.Parameter(torch.ones(2))
OPTIMIZER = torch.optim.Adam([WEIGHT], 0.1)


def test_what_is_beside_the_model() -> None:
    """An average of all weights; what another optimizer trains, and its state."""

    def step() -> None:
        AVERAGE.update()
        WEIGHT.grad = torch.ones(2)
        OPTIMIZER.param_groups[0]["lr"] *= 2
        OPTIMIZER.step()

    for _ in range(2):  # the optimizer has no state at first
        before = AVERAGE.module.weight.clone(), WEIGHT.detach().clone()
        states = [{**state} for state in OPTIMIZER.state.values()]
        values = [state["exp_avg"].clone() for state in states]
        chunk: Any = torch.nn.Linear(256, 256)
        chunk.buffers = []  # as of Megatron's DDP
        state = PlainState([chunk], (), Copies())
        step()
        state.restore()
        assert (AVERAGE.updates, [*AVERAGE.shadow]) == (0, ["a"])
        assert not AVERAGE.shadow["a"].any()
        assert all(map(torch.equal, (AVERAGE.module.weight, WEIGHT), before))
        assert [*OPTIMIZER.state.values()] == states
        assert OPTIMIZER.param_groups[0]["lr"] == 0.1
        now = [state["exp_avg"] for state in OPTIMIZER.state.values()]
        assert all(map(torch.equal, now, values))
        OPTIMIZER.step()


AVERAGES: list[dict[str, torch.Tensor]] = [{str(n): torch.zeros(1) for n in range(1500)}]
TEACHERS = {"last": [torch.nn.Linear(2, 2)]}
LAZY: dict[str, torch.Tensor] = {}
SCHEDULE = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(WEIGHT)]), 1)


def test_what_is_beside_the_model_in_containers_and_objects() -> None:
    """One average per chunk, or of a deep model; among the arguments; on a layer."""
    layer: Any = Layer()
    layer.average, teacher = Average(), TEACHERS["last"][0].weight
    layer.last = torch.zeros(plain._LARGEST + 1)
    arguments = argparse.Namespace(held=types.SimpleNamespace(average={"a": (torch.zeros(3),)}))
    tensors = [
        layer.last,
        *AVERAGES[0].values(),
        arguments.held.average["a"][0],
        layer.average.shadow["a"],
    ]
    before = teacher.detach().clone()
    state = PlainState([torch.nn.Linear(256, 257), layer], (), Copies(), arguments)
    for tensor in (*tensors, teacher.data):
        tensor.add_(1.0)
    arguments.held = types.SimpleNamespace()
    LAZY["a"] = AVERAGES[0]["0"]
    SCHEDULE.optimizer.step()
    SCHEDULE.step()
    state.restore()
    assert not any(tensor.any() for tensor in tensors)
    assert torch.equal(teacher, before)
    assert (LAZY, SCHEDULE.last_epoch) == ({}, 0)


BEGUN: Any = None
MODELS: list[torch.nn.Module] = []


@pytest.mark.parametrize("hooked", [False, True])
def test_what_a_step_begins(hooked: bool) -> None:
    """The first real step begins it anew; not what registers hooks."""
    global BEGUN
    layer, arguments = Layer(), argparse.Namespace(name=None)
    state = PlainState([layer], (), Copies(), arguments)
    BEGUN, arguments.average, arguments.name = Average(), types.SimpleNamespace(), "a"
    MODELS.append(torch.nn.Linear(2, 2))
    if hooked:
        layer.register_forward_hook(lambda *_: None)
    state.restore()
    assert (BEGUN is None, not MODELS) == (not hooked, not hooked)
    assert vars(arguments).keys() == ({"name", "average"} if hooked else {"name"})
    assert arguments.name == "a"
    MODELS.clear()
    BEGUN = None


DRAWS = {"torch": torch.Generator(), "numpy": np.random.default_rng(0)}
OLDER = np.random.RandomState(0), random.Random(0)


def test_a_users_generators() -> None:
    """Each training step draws what it would without a check; and each replay the same."""

    def draw() -> list[float]:
        older = [float(generator.random()) for generator in (DRAWS["numpy"], *OLDER)]  # type: ignore[union-attr]
        return [float(torch.rand((), generator=DRAWS["torch"])), *older]  # type: ignore[call-overload]

    state = PlainState([], ())
    drawn = draw()
    for _ in range(2):
        state.restore()
        assert draw() == drawn


@pytest.mark.parametrize("begins", [0, 1])
def test_memory_of_segments(begins: int) -> None:
    """Tensors in a list: a step replaces the list, or writes into one; it may have been empty."""
    layer: Any = Layer()
    layer.memory = memory = [torch.zeros(3)] * begins
    state = PlainState([torch.nn.Sequential(layer)], ())
    for tensor in memory:
        tensor.add_(1.0)
    layer.memory = [torch.ones(1 << 17)]
    state.restore()
    assert layer.memory is memory
    assert [tensor.tolist() for tensor in memory] == [[0.0] * 3] * begins
