# SPDX-License-Identifier: Apache-2.0
"""Capture and comparison on a stand-in for a GPU: right numbers, right devices, no waiting.

A whole traced step of a small model, the writing of its reference, and a perturbed replay. Planted
errors show that the stand-in sees a tensor on the wrong device, and a hook that waits.
"""

import contextlib
import dataclasses
import threading
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ttrace.capture.collectives import CollectiveTap
from megatron_ttrace.capture.step import StepTap, TracedModel
from megatron_ttrace.compare import device, sketch
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.routing import choice
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run.perturb import perturbed
from megatron_ttrace.trace import copies as copying
from megatron_ttrace.trace.budget import Budget
from megatron_ttrace.trace.captured import Routed
from megatron_ttrace.trace.checksum import checksum
from megatron_ttrace.trace.collectives import Phase
from megatron_ttrace.trace.copies import Copies
from megatron_ttrace.trace.records import Kind
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests import stand_in
from tests.capture.recorder import Model, batch
from tests.compare.traces import tolerances_of, writing
from tests.placement.meshes import mesh_of

CPU = torch.device("cpu")


class Optimizer:
    """Plain descent, with the results of Megatron's step: whether it was done, the norm."""

    def __init__(self, parameters):
        self._parameters = list(parameters)

    def step(self):
        for parameter in self._parameters:
            parameter.data -= 0.1 * parameter.grad
        return True, torch.stack([p.grad.norm() for p in self._parameters]).norm(), None


def run(sink, where, wrong=0.0, perturb=None, guard=stand_in.no_waiting):
    """One traced step of the small model, in which nothing may wait; errors of tracing surface."""
    model = Model().to(where)
    model.layers[1].second.weight.data[0, 0] += wrong
    ids, labels = (one.to(where) for one in batch())
    traced = TracedModel([model], [canonical_names(model)], Optimizer(model.parameters()), SINGLE)

    def fail(error):
        raise error

    def step():
        loss = model(ids, labels=labels)
        loss.backward()
        _, norm, _ = traced.optimizer.step()
        return {"lm loss": loss.detach()}, norm

    tap = StepTap(traced, sink, (0,), fail, lambda: None)
    tap._metrics = lambda result: None  # Megatron's log needs its arguments
    with guard():
        if perturb is None:
            tap.run(step)
        else:
            with perturbed(traced.names, perturb):
                tap.run(step)


def written(directory, where):
    with writing(directory) as sink:
        run(sink, where)
    return TraceReader(directory)


@pytest.fixture(scope="module")
def there():
    with stand_in.present() as found:
        yield found


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return written(tmp_path_factory.mktemp("cpu"), CPU)


def sink_of(reference, writer=None, budget=Budget()):  # noqa: B008 - it cannot change
    """A sink that stores what is wrong by more than rounding."""
    tolerances = tolerances_of(reference, 1e-6)
    layout = RankLayout(SINGLE, 5, 1.0)
    return CompareSink(reference, 1, layout, tolerances=tolerances, writer=writer, budget=budget)


def test_a_reference_of_the_device_is_the_one_of_the_host(reference, there, tmp_path):
    """Names, order and values."""
    found = written(tmp_path / "there", there)
    assert list(found) == list(reference)
    for key in reference:
        a, b = (trace.tensor(trace.entry(key)) for trace in (found, reference))
        assert torch.equal(a, b), key


@pytest.mark.parametrize(("room", "host"), [(24, 0), (0, 24), (0, 0)])
def test_copies_of_the_device_come_back(there, tmp_path, monkeypatch, room, host):
    """From its own memory, the host's, and a file."""
    data = torch.arange(6.0).to(there)
    monkeypatch.setattr(copying, "_PLAIN", (torch.Tensor, type(data)))
    with Copies(room, host, tmp_path) as copies:
        copy = copies.copy(data)
        assert copy.data.device.type == (there.type if room else "cpu" if host else "meta")
        data.zero_()
        assert (copy.get().device, copy.get().cpu().tolist()) == (data.device, [0, 1, 2, 3, 4, 5])
        copy.put(data)
        assert data.cpu().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_findings_of_the_device_are_those_of_the_host(reference, there, tmp_path, wrong):
    """The same sums, and the same tensors stored, when nothing or something is wrong."""
    made = {}
    for where in (CPU, there):
        writer = TraceWriter(tmp_path / where.type, 0)
        sink = sink_of(reference, writer)
        run(sink, where, wrong)
        made[where] = sink.measured
        writer.close()
        seal(writer.directory, {"role": "candidate"})
    for ours, theirs in zip(made[there], made[CPU], strict=True):
        assert ours.unread is None
        assert dataclasses.replace(ours, sums=None) == dataclasses.replace(theirs, sums=None)
        for name, value in dataclasses.asdict(ours.sums).items():
            if name == "checksum":
                continue  # another one on each kind of device
            assert value == pytest.approx(getattr(theirs.sums, name), rel=1e-5, abs=1e-6), name
    here, host = (TraceReader(tmp_path / where.type) for where in (there, CPU))
    assert set(here) == set(host)
    assert bool(list(here)) == bool(wrong)
    for key in host:
        assert torch.equal(here.tensor(here.entry(key)), host.tensor(host.entry(key)))


def test_no_more_is_staged_than_allowed(reference, there, tmp_path):
    """Beyond the limit the host does wait; within, the copies stay on the device."""
    with pytest.raises(stand_in.WaitedError):
        run(sink_of(reference, TraceWriter(tmp_path, 0), Budget(400)), there)


def test_isolation(reference, there):
    """The reference's inputs are put in place on the device: the error does not travel on.

    Whether a tensor is replaced is decided by its values, for which the host waits.
    """
    layout = RankLayout(SINGLE, 5, 1.0)
    wrong = {}
    for where in (CPU, there):
        sink = CompareSink(reference, 1, layout, isolate=True)
        run(sink, where, 0.5, guard=contextlib.nullcontext)
        wrong[where] = {
            one.key for one in sink.measured if one.sums.diff > 1e-9 * one.sums.reference
        }
    assert wrong[there] == wrong[CPU]
    names = {key.name for key in wrong[there] if key.kind is Kind.OUTPUT}
    assert names == {"layers.1.second"}


def test_a_choice_of_experts(there):
    """A router's scores and choice on the device, against the reference's on the host."""
    scores = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = scores.topk(2).indices, scores.roll(1, 0).topk(2).indices
    expected = choice(Routed(scores, ours), theirs)
    sums, others = choice(Routed(scores.to(there), ours.to(there)), theirs)
    assert others == expected[1] > 0
    assert sums.diff == pytest.approx(expected[0].diff)
    assert sums.checksum == checksum(ours.to(there).sort(dim=1).values)


def test_a_perturbed_replay(reference, there):
    """Moves every activation a little, on the device as on the host."""
    replay = CompareSink(reference, 1, RankLayout(SINGLE, 5, 1.0))
    run(replay, there, perturb=1)
    assert max(one.sums.diff for one in replay.measured) > 0


def test_a_share_of_a_sum(there):
    """The sketch of a partial tensor is the same on the device, without waiting."""
    c, r = torch.randn(3, 4), torch.randn(3, 4)
    boxes = [Box((0, 0), (0, 0), (3, 4))]
    expected = sketch.sums_of_share(c, r, boxes, 1.0, 2)
    c = c.to(there)
    with stand_in.no_waiting():
        found = sketch.sums_of_share(c, r, boxes, 1.0, 2)
    assert torch.equal(found.cpu(), expected)


WAITS, MISPLACES = stand_in.WaitedError, stand_in.WrongDeviceError
PLANTED = {
    "waits in the sum": (device, "plain_row", lambda f: lambda x, *a: f(x.cpu(), *a), WAITS),
    "reads an element": (device, "plain_row", lambda f: lambda x, *a: x[0].item() and f(x), WAITS),
    "forgets to move": (device, "to_device", lambda _: lambda data, where: data, MISPLACES),
    "moves and waits": (device, "to_device", lambda _: lambda data, where: data.to(where), WAITS),
    "stages on the host": (
        *(CompareSink, "_compare"),
        *(lambda f: lambda self, key, data, *a: f(self, key, data.cpu(), *a), WAITS),
    ),
}


@pytest.mark.parametrize(("owner", "name", "wrong", "error"), PLANTED.values(), ids=PLANTED)
def test_a_planted_error_is_seen(reference, there, monkeypatch, owner, name, wrong, error):
    """A ``.cpu()``, an ``.item()`` or a tensor of the host in the path fails the tests above."""
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    with pytest.raises(error):
        run(sink_of(reference), there)


class Reduced(torch.autograd.Function):
    """A collective in the backward pass, on a thread of the device."""

    threads: ClassVar[set[int]] = set()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Reduced.threads.add(threading.get_ident())
        dist.all_reduce(torch.ones(4))
        return grad


class Again(torch.autograd.Function):
    """Computes a module again in the backward pass, as activation recomputation does."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Reduced.apply(x) * self.weight


class Stack(torch.nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.layers = torch.nn.ModuleList([Scaled(), Scaled(), Scaled()])
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = Again.apply(layer, x) if self.recompute else layer(x)
        return x.sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_modules_of_collectives_on_threads_of_the_device(there, recompute):
    """Graph nodes have numbers of their own on each thread."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Stack(recompute).to(there)
        tap = CollectiveTap([canonical_names(model)], mesh_of(0, 2, tp=2))
        Reduced.threads.clear()
        with tap.active(1):
            for _ in range(2):
                model(torch.ones(4).to(there).requires_grad_()).backward()
    finally:
        dist.destroy_process_group()
    assert threading.get_ident() not in Reduced.threads
    found = tap.ledger()
    assert not found.error
    assert [(one.module, one.direction) for one in found.calls] == [
        (f"layers.{number}", Phase.BACKWARD) for number in (2, 1, 0)
    ]
    assert [times for ((_, times),) in found.sizes] == [2, 2, 2]
