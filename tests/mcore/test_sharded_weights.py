# SPDX-License-Identifier: Apache-2.0
"""Reading the buckets of Megatron-FSDP, built by Megatron itself, without processes.

And the rows of torch's FSDP2.
"""

import math
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ttrace.mcore.sharded_weights import (
    are_published,
    like,
    local,
    parts_of,
    publish,
    rows_of,
)

fsdp = pytest.importorskip("megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer")

SHAPES = [(3, 2), (5,), (2, 2)]


class Bucket(fsdp.DataParallelBuffer):
    """One of Megatron's buffers with memory of its own and nothing else."""

    def __init__(self, rank, size, distributed):
        strategy = types.SimpleNamespace(data_parallel_sharding_strategy="optim_grads")
        self.item_index_map, self.bucket_index, self.shard_bucket_index = (
            fsdp.build_data_parallel_buffer_index(
                [torch.Size(shape) for shape in SHAPES],
                rank,
                size,
                is_data_distributed=distributed,
                ddp_config=strategy,
            )
        )
        self.is_data_distributed = distributed
        index = self.shard_bucket_index if distributed else self.bucket_index
        first = self.shard_bucket_index.global_data_index if distributed else 0
        self.data = torch.arange(index.size, dtype=torch.float32) + first


def chunk(rank, size, *, distributed, main):
    """A wrapped model whose every element is its place in the bucket."""
    raw = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    named = []
    for number, parameter in enumerate(raw):
        stepped = torch.nn.Parameter(torch.zeros(1))
        stepped.orig_param = parameter
        named.append((str(number), stepped))
    group = types.SimpleNamespace(
        params=raw,
        model_weight_buffer=Bucket(rank, size, distributed),
        main_weight_buffer=Bucket(rank, size, True) if main else None,
    )
    buffer = types.SimpleNamespace(optimizer_named_parameters=named, parameter_groups=[group])
    return types.SimpleNamespace(param_and_grad_buffer=buffer), [p for _, p in named]


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_element_is_held_once(size, distributed, main):
    """With and without main weights, with whole model weights (ZeRO-1, 2) and parts (ZeRO-3)."""
    elements = [[] for _ in SHAPES]
    first = [0, 6, 11]
    for rank in range(size):
        model, parameters = chunk(rank, size, distributed=distributed, main=main)
        parts = parts_of([model])
        for number, parameter in enumerate(parameters):
            part = parts[parameter]
            start, end = part.range
            assert part.stepped.tolist() == [first[number] + i for i in range(start, end)]
            elements[number] += part.stepped.tolist()
            start, end = part.weights_range
            assert part.weights.tolist() == [first[number] + i for i in range(start, end)]
            assert distributed or end - start == parameter.orig_param.numel()
            assert part.computed.tolist() == part.stepped.tolist()
    assert elements == [list(range(6)), list(range(6, 11)), list(range(11, 15))]


def test_without_shards_the_raw_parameter_has_the_weights():
    """``no_shard`` has no bucket for the model's weights, but may have one for main weights."""
    model, parameters = chunk(1, 2, distributed=False, main=True)
    [group] = model.param_and_grad_buffer.parameter_groups
    group.model_weight_buffer, group.main_weight_buffer = None, Bucket(1, 2, False)
    parts = parts_of([model])
    for parameter, first in zip(parameters, [0, 6, 11], strict=True):
        raw, part = parameter.orig_param, parts[parameter]
        assert part.range == part.weights_range == (0, raw.numel())
        assert part.stepped.tolist() == [first + i for i in range(raw.numel())]
        assert part.weights.data_ptr() == raw.data_ptr()
    group.main_weight_buffer = None
    stepped = [part.stepped.data_ptr() for part in parts_of([model]).values()]
    assert stepped == [parameter.orig_param.data_ptr() for parameter in parameters]


def test_other_wrappers_have_no_buckets():
    """Megatron's DDP keeps its buffers elsewhere."""
    assert not are_published([torch.nn.Linear(2, 2)])
    model = torch.nn.Linear(2, 2)
    model.param_and_grad_buffer = object()
    assert not parts_of([model])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_groups_of_version_2(size):
    """Every element is held once, also by ranks that have none of a parameter."""
    experimental = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental"
    buckets = pytest.importorskip(f"{experimental}.dbuffer").DBuffer
    flat = pytest.importorskip(f"{experimental}.placement").Flat
    whole = [torch.arange(math.prod(shape)).view(shape) * 1.0 for shape in SHAPES]
    elements = [[] for _ in SHAPES]
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        mesh = init_device_mesh("cpu", (size,))
        parameters = [types.SimpleNamespace(sharded=torch.nn.Parameter(w)) for w in whole]
        calls = []
        group = types.SimpleNamespace(
            main_weight=buckets.distribute_tensors(whole, mesh, (flat(),)),
            model_weight=buckets.distribute_tensors([w + 100 for w in whole], mesh, (flat(),)),
            fsdp_parameters=parameters,
            sync_model_weight_from_main_weight=lambda calls=calls: calls.append(1),
        )
        model = torch.nn.Sequential(torch.nn.Module())
        model[0]._parameter_groups = (group,)
        parts = parts_of([model])
        for number, parameter in enumerate(parameters):
            part = parts[parameter.sharded]
            assert part.stepped.tolist() == list(range(*part.range))
            assert part.weights_range == part.range
            assert torch.equal(part.weights, part.stepped + 100)
            assert torch.equal(part.computed, part.weights)
            elements[number] += part.stepped.tolist()
            part.stepped.add_(1)  # a view
        assert are_published([model])
        publish([model])
        assert calls == [1]
        dist.destroy_process_group()
    assert elements == [list(range(math.prod(shape))) for shape in SHAPES]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_of_a_parameter(size):
    """torch's FSDP2 divides rows, unevenly if it must; a rank may have none."""
    elements = [[] for _ in SHAPES]
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        mesh = init_device_mesh("cpu", (size,))
        for number, shape in enumerate(SHAPES):
            weight = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
            # What fully_shard does; its collectives need processes.
            rows = [*weight.chunk(size), *[weight[:0]] * size][rank]
            sharded = DTensor.from_local(
                rows, mesh, [Shard(0)], shape=weight.shape, stride=weight.stride()
            )
            parameter = torch.nn.Parameter(sharded)
            assert rows_of(torch.nn.Parameter(weight)) is None
            model = torch.nn.Module()
            model.weight = parameter
            part = parts_of([model])[parameter]
            assert part.stepped.tolist() == list(range(*part.range))
            assert part.weights_range == part.range
            elements[number] += part.weights.tolist()
            parameter.orig_param = weight  # Megatron-FSDP's, which has buckets
            assert rows_of(parameter) is None
        dist.destroy_process_group()
    assert elements == [list(range(math.prod(shape))) for shape in SHAPES]


def test_plain_tensors_are_themselves():
    """Only sharded tensors have a part."""
    tensor = torch.ones(2)
    assert local(tensor) is tensor
    assert like(tensor, tensor) is tensor
