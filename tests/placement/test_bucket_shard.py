# SPDX-License-Identifier: Apache-2.0
"""ZeRO-2 and ZeRO-3: ranges of a bucket, by hand and against Megatron-FSDP's own index."""

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.placement.coverage import coverage
from megatron_ttrace.placement.placements import FlatShard
from megatron_ttrace.placement.plan import Step, plan
from tests.placement.meshes import mesh_of


def test_what_does_not_fit_is_refused():
    """An unpadded bucket; a parameter beyond its end."""
    with pytest.raises(ValueError, match="a bucket of 7 is not divisible by 2"):
        FlatShard.of_bucket(0, 7, 7, 0, 2)
    with pytest.raises(ValueError, match=r"6\.\.9 exceeds a bucket of 8"):
        FlatShard.of_bucket(6, 3, 8, 0, 2)


shapes = st.lists(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)


@given(shapes=shapes, size=st.integers(1, 5), factor=st.sampled_from([1, 4]))
def test_against_megatron_fsdp(shapes, size, factor):
    """Its own index of the bucket, its own slices of every parameter, on every rank."""
    fsdp = pytest.importorskip(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
    )
    strategy = types.SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params")
    boxes = {number: [] for number in range(len(shapes))}
    for rank in range(size):
        items, bucket, shard = fsdp.build_data_parallel_buffer_index(
            [torch.Size(shape) for shape in shapes],
            rank,
            size,
            is_data_distributed=True,
            ddp_config=strategy,
            chunk_size_factor=factor,
        )
        theirs = types.SimpleNamespace(
            is_data_distributed=True,
            item_index_map=items,
            bucket_index=bucket,
            shard_bucket_index=shard,
        )
        for number, shape in enumerate(shapes):
            item = items[number]
            ours = FlatShard.of_bucket(item.global_data_index, item.size, bucket.size, rank, size)
            start, end = fsdp.DataParallelBuffer._get_item_slice_in_shard(theirs, number)
            nothing = ours.end - ours.start == end - start == 0
            assert nothing or (ours.start, ours.end) == (start, end)
            boxes[number] += plan(shape, (Step("dp", ours),), mesh_of(rank, size))
    for number, shape in enumerate(shapes):
        held = coverage(shape, boxes[number])
        assert (held.least, held.most) == (1, 1)
