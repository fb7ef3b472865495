# SPDX-License-Identifier: Apache-2.0
"""ZeRO-2 and ZeRO-3 (``--use-megatron-fsdp``): which part of a parameter a rank keeps.

Megatron-FSDP lays the parameters of a bucket one after the other, pads the bucket to a multiple of
the data-parallel size and gives each rank an equal range of it
(``build_data_parallel_buffer_index`` in
megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py). What the strategies
``optim``, ``optim_grads`` and ``optim_grads_params`` divide so differs, how they divide does not: a
rank's part of a parameter is a :class:`~megatron_ttrace.placement.flat_shard.FlatShard`.
"""

from __future__ import annotations

from megatron_ttrace.placement.flat_shard import FlatShard


def bucket_shard(offset: int, numel: int, bucket: int, rank: int, size: int) -> FlatShard:
    """The part of one parameter that lies in a rank's range of a bucket.

    Args:
        offset: of the parameter's first element in the bucket.
        numel: elements of the parameter.
        bucket: elements of the padded bucket.
        rank: the data-parallel rank.
        size: number of data-parallel ranks.

    Returns:
        A range of the flattened parameter; empty where the rank holds nothing of it.

    Raises:
        ValueError: when the bucket is not divisible by ``size`` or does not hold the parameter.
    """
    if bucket % size:
        raise ValueError(f"a bucket of {bucket} is not divisible by {size}")
    if offset < 0 or offset + numel > bucket:
        raise ValueError(f"{offset}..{offset + numel} exceeds a bucket of {bucket}")
    part = bucket // size
    start = min(max(rank * part - offset, 0), numel)
    end = min(max((rank + 1) * part - offset, 0), numel)
    return FlatShard(start, end)
