# SPDX-License-Identifier: Apache-2.0
"""Each collective is recorded with its module and direction, and nothing else changes.

The process group is PyTorch's fake one: its collectives do nothing, through the same methods.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn.modules import module as modules
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from megatron_ttrace.capture.collectives import _METHODS, CollectiveTap
from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.trace.collectives import Call, ModuleCode, Operation, Phase
from megatron_ttrace.trace.records import Kind
from tests.capture.recorder import Recorder, tapped
from tests.placement.meshes import mesh_of

SIZE = 4


@pytest.fixture(autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    """This process is the first of two ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    dist.destroy_process_group()


class Copy(torch.autograd.Function):
    """Its gradient is reduced."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    """Its output is reduced."""

    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x, group=group)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Parallel(nn.Module):
    """A linear layer, and the region before or behind it."""

    def __init__(self, group: dist.ProcessGroup, function: type) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(SIZE))
        self.group, self.function = group, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.function is Copy:
            return Copy.apply(x, self.group) @ self.weight
        return Reduce.apply(x @ self.weight, self.group)


class Layer(nn.Module):
    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.column, self.row = Parallel(group, Copy), Parallel(group, Reduce)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.row(self.column(x).relu())


class Model(nn.Module):
    def __init__(self, group: dist.ProcessGroup, recompute: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(group, 1), Layer(group, 2)])
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute)
        return x.sum()


class InPlace(nn.Module):
    """Adds up one module's output in place, and gives it to another."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.first, self.second, self.group = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.group is not None:
            dist.all_reduce(x.detach(), group=self.group)
        return self.second(x).sum()


@pytest.mark.parametrize("adds_up", [True, False])
def test_a_tensor_that_a_collective_changed(group: dist.ProcessGroup, adds_up: bool) -> None:
    """It is looked at again, though its version does not tell."""
    model, sink = InPlace(group if adds_up else None), Recorder()
    with tap_of(model).active(1), tapped([model], sink):
        model(torch.rand(2, SIZE)).backward()
    assert ((0, Kind.INPUT, "second", 0) in sink.repeats) is not adds_up
    assert (0, Kind.GRAD_INPUT, "second", 0) in sink.values


def tap_of(model: nn.Module) -> CollectiveTap:
    """For a model on two tensor-parallel ranks."""
    return CollectiveTap([canonical_names(model)], mesh_of(0, 2, tp=2))


def recorded(tap: CollectiveTap) -> list[tuple[Call, int, int]]:
    """What was recorded, without an error: calls, bytes and counts."""
    ledger = tap.ledger()
    assert not ledger.error
    return [
        (call, size, times)
        for call, sizes in zip(ledger.calls, ledger.sizes, strict=True)
        for size, times in sizes
    ]


@pytest.mark.parametrize("recompute", [None, True, False])
def test_module_and_direction(group: dist.ProcessGroup, recompute: bool | None) -> None:
    """Also of what is computed again within the backward pass, and of its own backward pass."""
    model = Model(group, recompute)
    tap = tap_of(model)
    with tap.active(3):
        for _ in range(2):
            model(torch.ones(2, SIZE, requires_grad=True)).backward()
    found = {(one[0].module, one[0].direction): one for one in recorded(tap)}
    expected = {
        (f"layers.{layer}.{name}", phase)
        for layer in range(2)
        for name, phases in {
            # Without reentry, recomputation stops at the last saved tensor, before the reduction.
            "row": [Phase.FORWARD, *[Phase.RECOMPUTATION] * (recompute is True)],
            "column": [Phase.BACKWARD],
        }.items()
        for phase in phases
    }
    assert found.keys() == expected
    for one, size, times in found.values():
        assert (one.iteration, times) == (3, 2)
        known = tap.ledger().groups[one.group]
        assert (known.name, known.members) == ("tp", ((0, 1, 1),))
        assert (one.operation, one.reduction) == (Operation.ALL_REDUCE, "sum")
        assert (one.dtype, size, one.agreed) == ("float32", 32, 32)
        assert one.where.endswith(
            f"({'Reduce.forward' if 'row' in one.module else 'Copy.backward'})"
        )


def test_functions_of_modules(group: dist.ProcessGroup) -> None:
    """The autograd functions of a module itself; those inside it belong to the inner one."""
    model = Model(group)
    tap = tap_of(model)
    with tap.active(1):
        model(torch.ones(2, SIZE, requires_grad=True)).backward()
    column = tap.functions("layers.1.column")
    assert column.backward.endswith("(Copy.backward)")
    assert tap.functions("layers.1") == tap.functions("layers.7") == ModuleCode()


class Scaled(torch.autograd.Function):
    """Adds the gradient of a further loss."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad

    @staticmethod
    def set_loss_scale(scale):
        """As Megatron's."""


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(self.gate(self.norm(x)) * 2).sum()


def test_what_uses_an_output(group: dist.ProcessGroup) -> None:
    """The autograd function next to it in the module around it; a module uses no other's code."""
    model = Router()
    tap = tap_of(model)
    with tap.active(1):
        model(torch.ones(2, SIZE))
    users = {
        name: tap.functions(name).user.rpartition(" ")[2] for name in ("gate", "norm", "model")
    }
    assert users == {"gate": "(Scaled.backward)", "norm": "", "model": ""}


def test_the_schedule_that_calls_the_model(group: dist.ProcessGroup) -> None:
    """It scales the loss; whatever script is in between."""
    made: dict[str, Any] = {}
    file = f"{sources.megatron_folder()}core/pipeline_parallel/schedules.py"
    exec(compile("def run(step, x):\n    return step(x)", file, "exec"), made)
    model = Router()
    tap = tap_of(model)
    with tap.active(1):
        made["run"](lambda x: model(x), torch.ones(2, SIZE))
    place = "megatron/core/pipeline_parallel/schedules.py:2 (run)"
    assert tap.functions("model").user == place
    assert tap.functions("gate").user.endswith("(Scaled.backward)")


def test_every_way_to_call(group: dist.ProcessGroup) -> None:
    """Functions of ``torch.distributed`` under any name, coalesced ones and functional ones."""
    gather = dist.all_gather_into_tensor
    x, two = torch.ones(4, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    tap = tap_of(nn.Linear(1, 1))
    with tap.active(1):
        gather(two, x, group=group)
        dist._all_gather_base(two, x, group=group)
        dist.all_gather([x, x.clone()], x, group=group)
        dist.reduce_scatter_tensor(x, two, op=dist.ReduceOp.AVG, group=group)
        dist._reduce_scatter_base(x, two, group=group)
        dist.reduce_scatter(x, [x, x], group=group)
        dist.all_reduce(x, dist.ReduceOp.MAX, group)
        dist.all_to_all_single(two, two, [2, 6], [4, 4], group=group)
        dist.broadcast(x, 0, group=group)
        with dist._coalescing_manager(group):
            dist.all_reduce(x, group=group)
            dist.all_reduce(two, group=group)
        ops = [dist.P2POp(dist.isend, x, 1, group), dist.P2POp(dist.irecv, two, 1, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        funcol.all_reduce(two, "sum", group)
        dist.barrier(group)
    found = [
        (one.operation.value, one.reduction, size, one.agreed, one.peer, times)
        for one, size, times in recorded(tap)
    ]
    assert found == [
        ("all_gather", "", 8, 8, -1, 1),
        ("all_gather", "", 8, 8, -1, 1),
        ("all_gather", "", 8, 16, -1, 1),
        ("reduce_scatter", "avg", 16, 16, -1, 1),
        ("reduce_scatter", "sum", 16, 16, -1, 1),
        ("reduce_scatter", "sum", 16, 16, -1, 1),
        ("all_reduce", "max", 8, 8, -1, 1),
        ("all_to_all", "", 16, -1, -1, 1),
        ("broadcast", "", 8, 8, -1, 1),
        ("all_reduce", "sum", 8, 8, -1, 1),
        ("all_reduce", "sum", 16, 16, -1, 1),
        ("send", "", 8, -1, 1, 1),
        ("recv", "", 16, -1, 1, 1),
        ("all_reduce", "sum", 16, 16, -1, 1),
    ]


def test_order(group: dist.ProcessGroup) -> None:
    """The same collectives in another order have another checksum."""
    orders = []
    for sizes in ([4, 8], [8, 4], [4, 8]):
        tap = tap_of(nn.Linear(1, 1))
        with tap.active(1):
            for size in sizes:
                dist.all_reduce(torch.ones(size), group=group)
        (known,) = tap.ledger().groups
        assert known.communicator == group.group_name
        orders.append(known.order)
    assert orders[0] == orders[2] != orders[1]


def test_everything_is_put_back(group: dist.ProcessGroup) -> None:
    """Also after an error of the step; one rank alone has no collectives."""
    before = {name: vars(dist.ProcessGroup).get(name) for name in _METHODS}
    hooks = len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)
    functional = dict(vars(funcol))
    alone = dist.new_group([0])
    tap = tap_of(nn.Linear(1, 1))

    def step() -> None:
        assert vars(dist.ProcessGroup)["allreduce"] is not before["allreduce"]
        dist.all_reduce(torch.ones(1), group=alone)
        raise KeyError

    with pytest.raises(KeyError), tap.active(1):
        step()
    assert {name: vars(dist.ProcessGroup).get(name) for name in _METHODS} == before
    assert (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)) == hooks
    assert dict(vars(funcol)) == functional
    assert recorded(tap) == []


def test_an_error_of_ours_is_no_error_of_the_step(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes on; the record says that it is not complete."""

    def broken(*args: object, **named: object) -> None:
        raise RuntimeError("broken")

    tap = tap_of(nn.Linear(1, 1))
    monkeypatch.setattr(tap, "_add", broken)
    with tap.active(1):
        dist.all_reduce(torch.ones(4), group=group)
    assert tap.ledger().error == "RuntimeError: broken"


def test_another_pytorch(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the record needs of PyTorch, nothing is attached, and the step runs."""
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    before = vars(dist.ProcessGroup)["allreduce"]
    tap = tap_of(nn.Linear(1, 1))
    with tap.active(1):
        assert vars(dist.ProcessGroup)["allreduce"] is before
        dist.all_reduce(torch.ones(4), group=group)
    assert "_current_autograd_node" in tap.ledger().error
