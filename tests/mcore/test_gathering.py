# SPDX-License-Identifier: Apache-2.0
"""Gathers in forward passes are due again after a check made them, and come in a first step too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ttrace.mcore import gathering


class Wrapped(torch.nn.Module):
    """A chunk in ``DistributedDataParallel``, with two buckets of which one is gathered."""

    def __init__(self, *, aligned: bool = False, enabled: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(param_sync_func="before")
        self.ddp_config = SimpleNamespace(align_param_gather=aligned)
        self.use_forward_hook = True
        self.remove_forward_pre_hook_handles = {"module": "handle"} if enabled else {}
        self.bucket_groups = [SimpleNamespace(param_gather_dispatched=False)]
        self.expert_parallel_bucket_groups = [SimpleNamespace(param_gather_dispatched=True)]

    def enable_forward_pre_hook(self) -> None:
        assert not self.remove_forward_pre_hook_handles
        self.remove_forward_pre_hook_handles = {"module": "handle"}

    def disable_forward_pre_hook(self, *, param_sync: bool) -> None:
        assert self.remove_forward_pre_hook_handles
        assert not param_sync
        self.remove_forward_pre_hook_handles = {}

    def start_param_sync(self) -> None:
        pass

    @property
    def groups(self) -> list[Any]:
        return [*self.bucket_groups, *self.expert_parallel_bucket_groups]


def test_a_gather_remains_due() -> None:
    """Only what was due before."""
    chunk = Wrapped()
    with gathering.still_due([chunk, torch.nn.Linear(1, 1)]):
        chunk.bucket_groups[0].param_gather_dispatched = True
    assert [group.param_gather_dispatched for group in chunk.groups] == [False, True]


@pytest.mark.parametrize("elsewhere_due", [False, True])
def test_nothing_else_is_gathered(monkeypatch: pytest.MonkeyPatch, elsewhere_due: bool) -> None:
    """What the job takes for gathered keeps its values, unless another rank gathers it."""
    chunk: Any = Wrapped()
    chunk.weight = torch.nn.Parameter(torch.zeros(1))
    began = []

    class Group:
        def __init__(self, name: str, *, dispatched: bool, handle: str | None = None) -> None:
            self.name = name
            self.param_gather_dispatched, self.param_gather_handle = dispatched, handle
            self.intra_distributed_optimizer_instance_group = "ranks"

        def start_param_sync(self, **_: bool) -> None:
            began.append(self.name)

    due, done = Group("due", dispatched=False), Group("done", dispatched=True)
    groups = [due, Group("on its way", dispatched=True, handle="handle"), done]
    chunk.bucket_groups, chunk.expert_parallel_bucket_groups = groups[:2], groups[2:]

    def agreed(value: torch.Tensor, operation: object, group: str) -> None:
        assert (operation, group) == (torch.distributed.ReduceOp.MIN, "ranks")
        value.mul_(not elsewhere_due)

    monkeypatch.setattr(torch.distributed, "all_reduce", agreed)
    with gathering.nothing_else([chunk]):
        for group in groups:
            group.start_param_sync(force_sync=True)
    assert began == ["due", "on its way", *(["done"] if elsewhere_due else [])]
    done.start_param_sync()
    assert began[-1] == "done"


@pytest.mark.parametrize("layer_wise", [False, True])
def test_what_a_forward_pass_has_to_gather(layer_wise: bool) -> None:
    """It is overwritten, but neither this rank's own part nor what is gathered already."""
    chunk: Any = Wrapped()
    size = 8
    for group in chunk.groups:
        data = torch.rand(size) + 0.5
        lists = [[torch.nn.Parameter(half)] for half in data.chunk(2)]
        group.ddp_config = SimpleNamespace(use_distributed_optimizer=not layer_wise)
        group.intra_distributed_optimizer_instance_rank = 1
        group.intra_distributed_optimizer_instance_size = 2
        held = {"layerwise_params_list": lists, "params": [*lists[0], *lists[1]]}
        group.buckets = [SimpleNamespace(param_data=data, **held)]
    before = [group.buckets[0].param_data.clone() for group in chunk.groups]
    assert gathering.spoil([chunk]) == chunk.groups[0].buckets[0].params
    after = [group.buckets[0].param_data for group in chunk.groups]
    assert (after[0] != before[0]).tolist() == [True] * (size // 2) + [False] * (size // 2)
    assert torch.equal(after[1], before[1])


def test_what_is_saved_is_what_the_job_has() -> None:
    """Values that a check has gathered early are the job's own again; others stay gathered."""
    chunk: Any = Wrapped()
    stale, fresh = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    for group, parameter in zip(chunk.groups, (stale, fresh), strict=True):
        group.buckets = [SimpleNamespace(params={parameter})]
    with gathering.without_effect([chunk]), gathering.still_due([chunk]):
        for parameter in (stale, fresh):
            parameter.data.fill_(1.0)
    assert (stale.tolist(), fresh.tolist()) == ([0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("aligned", [False, True])
def test_forward_passes_gather(chunks: int, aligned: bool) -> None:
    """With the schedule's calls, if there are any; afterwards all is as before."""
    model = [Wrapped(aligned=aligned) for _ in range(chunks)]
    with gathering.in_forward_passes(model):
        assert all(chunk.remove_forward_pre_hook_handles for chunk in model)
        starts = model[0].config.param_sync_func
        expected = [chunk.start_param_sync for chunk in model]
        wanted = expected if chunks > 1 else expected[0]
        assert starts == (wanted if aligned else "before")
        with gathering.in_forward_passes(model):
            pass
        assert all(chunk.remove_forward_pre_hook_handles for chunk in model)
    assert not any(chunk.remove_forward_pre_hook_handles for chunk in model)
    assert model[0].config.param_sync_func == "before"


def test_later_steps_are_left_alone() -> None:
    """Megatron lets them gather itself; other wrappers have nothing to enable."""
    model = [Wrapped(enabled=True), torch.nn.Linear(1, 1)]
    with gathering.in_forward_passes(model):
        pass
    assert model[0].remove_forward_pre_hook_handles
