# SPDX-License-Identifier: Apache-2.0
"""Optimizer state that a checkpoint stores as the distributed optimizer's buckets.

Without ``--dist-ckpt-optim-fully-reshardable`` a tensor of ``torch_dist`` is a whole bucket, named
by numbers (``sharded_param_state_dp_reshardable`` in megatron/core/optimizer/distrib_optimizer.py).
Which elements are whose follows from the gradient buffers of a job with the same tensor and
pipeline parallelism.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_ttrace.mcore.checkpoints.stored import Checkpoint, Index, Stored, state_of
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.optimizer import leaves_of
from megatron_ttrace.placement.coverage import coverage
from megatron_ttrace.trace.collectives import Shard
from megatron_ttrace.trace.states import Bucketed, Item
from megatron_ttrace.trace.views import local_view, logical_view


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


def shards_of(optimizer: Any, chunks: Iterable[Names]) -> tuple[dict[str, str], dict[str, Shard]]:
    """The buckets of a rank's parameters, and its shards of them, by canonical names."""
    name_of = {parameter: name for names in chunks for name, parameter in names.parameters.items()}
    shards = {
        name_of[parameter]: Shard(ranges["param"].start, ranges["param"].end, parameter.numel())
        for leaf in leaves_of(optimizer)
        for by_dtype in getattr(leaf, "gbuf_ranges", ())
        for maps in by_dtype.values()
        for bucket in maps
        for parameter, ranges in bucket["param_map"].items()
        if parameter in name_of
    }
    return {name_of[p]: key for p, key, _ in in_buckets(optimizer) if p in name_of}, shards


def by_parameter(checkpoint: Checkpoint, pieces: Iterable[Bucketed]) -> Checkpoint:
    """A checkpoint with all tensors that its buckets have completely.

    ``pieces`` are those of all ranks of a job with these buckets, by stored names, which have the
    numbers of layers and experts. Elements that replicas in several buckets disagree about are NaN.
    """
    by_name: defaultdict[str, dict[Bucketed, None]] = defaultdict(dict)
    for piece in pieces:
        by_name[piece.name][piece] = None
    buckets: defaultdict[str, dict[str, Stored]] = defaultdict(dict)
    for key, stored in checkpoint.unread.items():
        home, _, slot = key.rpartition(".")
        buckets[home][slot] = stored
    tensors: dict[Item, Stored] = {}
    for name, pieces_of_name in by_name.items():
        for slot in {slot: None for p in pieces_of_name for slot in buckets.get(p.key, ())}:
            stored_pieces = [
                (piece, bucket)
                for piece in pieces_of_name
                if (bucket := buckets.get(piece.key, {}).get(slot)) is not None
                and piece.start + math.prod(piece.shape) <= bucket.shape[0]
            ]
            shape = next(iter(pieces_of_name)).logical_shape
            if coverage(shape, [box for p, _ in stored_pieces for box in p.boxes]).complete:
                tensors[state_of(slot, name)] = _assembled(shape, stored_pieces)
    read = {piece.key for pieces_of_name in by_name.values() for piece in pieces_of_name}
    unread = {k: s for k, s in checkpoint.unread.items() if k.rpartition(".")[0] not in read}
    return dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, **tensors}, unread=unread)


def _assembled(shape: tuple[int, ...], pieces: list[tuple[Bucketed, Stored]]) -> Stored:
    def load(index: Index) -> torch.Tensor:
        tensor = torch.zeros(shape)
        is_set, is_contradicted = torch.zeros(2, *shape, dtype=torch.bool)
        for piece, bucket in pieces:
            values = bucket.rows(piece.start, piece.start + math.prod(piece.shape)).read()
            for box in piece.boxes:
                old = logical_view(tensor, box)
                new = local_view(values.float().view(piece.shape), box)
                differs = (old != new) & ~(old.isnan() & new.isnan())
                logical_view(is_contradicted, box).logical_or_(logical_view(is_set, box) & differs)
                logical_view(is_set, box).fill_(True)
                old.copy_(new)
        return tensor.masked_fill(is_contradicted, math.nan)[index]

    return Stored(shape, load)
