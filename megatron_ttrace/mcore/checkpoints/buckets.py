# SPDX-License-Identifier: Apache-2.0
"""Optimizer state that a checkpoint stores as the distributed optimizer's buckets.

Without ``--dist-ckpt-optim-fully-reshardable`` a tensor of ``torch_dist`` is a whole bucket, named
by numbers (``sharded_param_state_dp_reshardable`` in megatron/core/optimizer/distrib_optimizer.py).
Which elements are whose follows from the gradient buffers of a job with the same tensor and
pipeline parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.codec import Count


@dataclasses.dataclass(frozen=True, slots=True)
class Bucketed:
    """A rank's part of a parameter in a bucket.

    Attributes:
        name: of the parameter.
        key: of the bucket, without the state's name.
        start: the first element in the bucket.
        shape: of the part.
        boxes: of the logical parameter, which the part is.
    """

    name: str
    key: str
    start: Count
    shape: tuple[Count, ...]
    boxes: tuple[Box, ...]


def in_buckets(optimizer: Any, prefix: str = "") -> Iterator[tuple[torch.nn.Parameter, str, int]]:
    """Each parameter of distributed optimizers, with its bucket's key and its first element."""
    chained = getattr(optimizer, "chained_optimizers", ())
    for number, part in enumerate(chained):
        yield from in_buckets(part, f"{prefix}chained_{number}." if len(chained) > 1 else prefix)
    if chained or not hasattr(optimizer, "data_parallel_group_idx"):
        return
    group = f"{prefix}optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}"
    ranges = zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)
    for number, (buffer, by_dtype) in enumerate(ranges):
        dtype = next(iter(by_dtype))
        for order, bucket in enumerate(buffer.buckets):
            key = f"{group}.gbuf_idx_{number}.dtype_{dtype}.bucket_idx_{order}"
            for parameter, (start, _) in getattr(bucket, "param_to_index", {}).items():
                yield parameter, key, start
