# SPDX-License-Identifier: Apache-2.0
"""Buckets of the distributed optimizer, by parameter."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.mcore.checkpoints.buckets import by_parameter, in_buckets, shards_of
from megatron_ttrace.mcore.checkpoints.stored import Checkpoint, Format, Stored
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.collectives import Shard
from megatron_ttrace.trace.states import Bucketed, Item, State

WHOLE = torch.randn(4, 6)
NORM = torch.randn(6)


def stored_tensor(data: torch.Tensor) -> Stored:
    """A bucket."""
    return Stored(tuple(data.shape), lambda index: data[index])


def of_rank(rank: int) -> tuple[dict[str, Stored], list[Bucketed]]:
    """The buckets of one of two tensor-parallel ranks, with columns of a weight and a norm."""
    bucket = torch.full((200,), math.nan)
    bucket[3:9] = NORM
    bucket[64:76] = WHOLE[:, 3 * rank : 3 * rank + 3].reshape(-1)
    key = f"optimizer.distributed.dp_group_idx_{rank}.bucket_idx_0"
    parts = [
        Bucketed("norm", key, 3, (6,), (6,), (Box((0,), (6,), (0,)),)),
        Bucketed("w", key, 64, (4, 3), (4, 6), (Box((0, 3 * rank), (4, 3), (0, 0)),)),
    ]
    return {f"{key}.param": stored_tensor(bucket), f"{key}.GG": stored_tensor(bucket)}, parts


@pytest.fixture
def saved() -> tuple[Checkpoint, list[Bucketed]]:
    """Two tensor-parallel ranks' buckets, and where two data-parallel ranks say parameters are."""
    buckets, parts = {"optimizer.distributed.other.param": stored_tensor(torch.ones(3))}, []
    for rank in (0, 1):
        rank_buckets, where = of_rank(rank)
        buckets |= rank_buckets
        parts += where * 2
    return Checkpoint(Format.TORCH_DIST, {}, unread=buckets), parts


def test_parameters_of_buckets(saved: tuple[Checkpoint, list[Bucketed]]) -> None:
    """They are put together from the buckets of all ranks; others stay unread."""
    checkpoint, parts = saved
    read = by_parameter(checkpoint, parts)
    assert [*read.unread] == ["optimizer.distributed.other.param"]
    for item in (Item(State.MAIN, "w"), Item(State.OTHER, "w", "GG")):
        assert torch.equal(read.tensors[item].read(), WHOLE)
    row = read.tensors[Item(State.MAIN, "w")].at(2)
    assert row is not None
    assert torch.equal(row.read(), WHOLE[2])
    assert torch.equal(read.tensors[Item(State.MAIN, "norm")].read(), NORM)
    assert len(read.tensors) == 4


def test_elements_in_no_bucket(saved: tuple[Checkpoint, list[Bucketed]]) -> None:
    """What is not there completely is not there."""
    checkpoint, parts = saved
    outside = [*parts[:3], dataclasses.replace(parts[-1], start=190)]
    for some in (parts[:2], outside):
        read = by_parameter(checkpoint, some).tensors
        assert {item.name for item in read} == {"norm"}


def test_buckets_that_disagree(saved: tuple[Checkpoint, list[Bucketed]]) -> None:
    """Elements of a replica that differs are NaN, whatever comes after it."""
    checkpoint, parts = saved
    key = "optimizer.distributed.dp_group_idx_1.bucket_idx_0.param"
    wrong = checkpoint.unread[key].read().clone()
    wrong[4] += 1
    first = parts[0]
    third = dataclasses.replace(first, key=first.key.replace("idx_0.", "idx_2."))
    unread = {**checkpoint.unread, key: stored_tensor(wrong)}
    unread[f"{third.key}.param"] = checkpoint.unread[f"{first.key}.param"]
    checkpoint = dataclasses.replace(checkpoint, unread=unread)
    read = by_parameter(checkpoint, [*parts, third]).tensors[Item(State.MAIN, "norm")]
    assert read.read().isnan().tolist() == [False, True, False, False, False, False]


def test_parts_of_an_optimizer() -> None:
    """Keys as Megatron's, with a prefix only in a chain."""
    first, second = (torch.nn.Parameter(torch.ones(n)) for n in (3, 4))
    buckets = [SimpleNamespace(param_to_index={p: (64, 70)}) for p in (first, second)]
    leaf = SimpleNamespace(
        gbuf_ranges=[{"D": []}],
        buffers=[SimpleNamespace(buckets=buckets)],
        data_parallel_group_idx=7,
    )
    group = "optimizer.distributed.dp_group_idx_7.gbuf_idx_0.dtype_D"
    wanted = [(first, f"{group}.bucket_idx_0", 64), (second, f"{group}.bucket_idx_1", 64)]
    assert list(in_buckets(leaf)) == wanted
    assert list(in_buckets(SimpleNamespace(chained_optimizers=[leaf]))) == wanted
    chain = SimpleNamespace(chained_optimizers=[SimpleNamespace(), leaf])
    assert [key for _, key, _ in in_buckets(chain)] == [f"chained_1.{key}" for _, key, _ in wanted]


def test_shards_of_a_rank() -> None:
    """Only those of named parameters; other optimizers have none."""
    weight, norm, other = (torch.nn.Parameter(torch.ones(6)) for _ in range(3))
    ranges = {
        parameter: {"param": SimpleNamespace(start=2, end=6)} for parameter in (weight, other)
    }
    indices = {weight: (0, 6), norm: (6, 12), other: (12, 18)}
    leaf = SimpleNamespace(
        data_parallel_group_idx=0,
        buffers=[SimpleNamespace(buckets=[SimpleNamespace(param_to_index=indices)])],
        gbuf_ranges=[{"float32": [{"param_map": ranges}]}],
    )
    names = [Names({}, {"w": weight, "norm": norm}, {}, frozenset())]
    buckets, shards = shards_of(SimpleNamespace(chained_optimizers=[leaf]), names)
    assert set(buckets) == {"w", "norm"}
    assert shards == {"w": Shard(2, 6, 6)}
    assert shards_of(SimpleNamespace(), names) == ({}, {})
