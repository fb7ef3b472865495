# SPDX-License-Identifier: Apache-2.0
"""What one mesh axis does to a tensor: the placements, in DTensor's sense of the word.

===================  ===============================================  ===========================
placement            what rank r of n holds                           used by
===================  ===============================================  ===========================
``Shard(dim)``       the r-th of n equal contiguous parts of a dim    tensor, sequence parallelism
``BlockShard(dim)``  the r-th part of each of several equal blocks    gate and up projection
``GroupShard(dim)``  one of fewer parts than there are ranks          keys and values of few groups
``ZigZag(dim)``      chunks r and 2n-1-r of 2n equal chunks of a dim  context parallelism
                     (of each sequence, if several are packed)
``PartShard(dim)``   part r % p of p; the last one may be short       weights in shards (GTP)
``FlatShard(a, b)``  elements a..b of what the other axes left, flat  ZeRO, Megatron-FSDP
===================  ===============================================  ===========================

Each ``divide`` returns what ``rank`` of ``size`` keeps of a dim, and raises ``ValueError`` when the
dim does not divide.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Self

from megatron_ttrace.placement.boxes import Box, DimMap, join, length, product, rows, take


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Equal contiguous parts of ``dim``.

    Tensor parallelism divides weights and hidden dims so (megatron/core/tensor_parallel/layers.py),
    sequence parallelism divides dim 0 of activations so (mappings.py).
    """

    dim: int

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """What ``rank`` of ``size`` keeps. Raises ``ValueError``."""
        total = length(dim_map)
        if total % size:
            raise ValueError(f"a dim of {total} is not divisible by {size}")
        part = total // size
        return take(dim_map, rank * part, (rank + 1) * part)

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclasses.dataclass(frozen=True, slots=True)
class BlockShard:
    """Blocks along ``dim``, each divided into equal contiguous parts.

    ``blocks`` is the number of equal blocks, or the shares of unequal ones: of ``(2, 1)`` the first
    is twice as long as the second.

    A gated MLP stacks gate and up projection in ``linear_fc1`` (megatron/core/transformer/mlp.py).
    Every rank chunks its *local* output into (gate, up), so rank r holds the r-th part of the gate
    followed by the r-th part of the up projection, not the r-th part of the stack. Mamba's
    ``in_proj`` stacks blocks of different sizes likewise (megatron/core/ssm/mamba_mixer.py).
    """

    dim: int
    blocks: int | tuple[int, ...] = 2

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """What ``rank`` of ``size`` keeps. Raises ``ValueError``."""
        total = length(dim_map)
        shares = (1,) * self.blocks if isinstance(self.blocks, int) else self.blocks
        if total % sum(shares):
            equal = f"{self.blocks} equal blocks" if isinstance(self.blocks, int) else self.blocks
            raise ValueError(f"a dim of {total} does not divide into {equal}")
        share = total // sum(shares)
        bounds = [share * bound for bound in itertools.accumulate(shares, initial=0)]
        parts = [take(dim_map, start, end) for start, end in itertools.pairwise(bounds)]
        return join([Shard(self.dim).divide(part, rank, size) for part in parts])

    def __str__(self) -> str:
        return f"BlockShard({self.dim}, {self.blocks})"


@dataclasses.dataclass(frozen=True, slots=True)
class GroupShard:
    """``parts`` equal contiguous parts of ``dim``, each on as many consecutive ranks.

    With fewer groups of keys and values than tensor-parallel ranks, the ranks whose query heads
    belong to one group all have that group (``get_query_key_value_tensors`` in
    megatron/core/transformer/attention.py).
    """

    dim: int
    parts: int

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """What ``rank`` of ``size`` keeps. Raises ``ValueError``."""
        if size % self.parts:
            raise ValueError(f"{size} ranks do not divide into {self.parts} groups")
        return Shard(self.dim).divide(dim_map, rank * self.parts // size, self.parts)

    def __str__(self) -> str:
        return f"GroupShard({self.dim}, {self.parts})"


@dataclasses.dataclass(frozen=True, slots=True)
class ZigZag:
    """Chunks ``r`` and ``2n-1-r`` of ``2n`` equal chunks of ``dim``.

    So causal attention costs every context-parallel rank the same (``get_batch_on_this_cp_rank`` in
    megatron/core/utils.py). With ``ends``, where packed sequences end in ``dim``, each of them is
    divided so (``thd_get_partitioned_indices`` of TransformerEngine).
    """

    dim: int
    ends: tuple[int, ...] = ()

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """What ``rank`` of ``size`` keeps. Raises ``ValueError``."""
        total = length(dim_map)
        if self.ends and self.ends[-1] != total:
            raise ValueError(f"packed sequences end at {self.ends[-1]}, the dim at {total}")
        parts = []
        for start, end in itertools.pairwise((0, *(self.ends or (total,)))):
            if (end - start) % (2 * size):
                raise ValueError(
                    f"a sequence of {end - start} does not divide into {2 * size} chunks"
                )
            chunk = (end - start) // (2 * size)
            for index in (rank, 2 * size - 1 - rank):
                parts.append(take(dim_map, start + index * chunk, start + (index + 1) * chunk))
        return join(parts)

    def __str__(self) -> str:
        packed = f", {len(self.ends)} sequences" if self.ends else ""
        return f"ZigZag({self.dim}{packed})"


@dataclasses.dataclass(frozen=True, slots=True)
class PartShard:
    """``parts`` parts of ``length`` of ``dim``, one on each of as many consecutive ranks.

    The dim may end within a part: the rest of it is padding, on which nothing depends. So
    generalized tensor parallelism divides what tensor parallelism left of a weight
    (``gtp_remat_shard_dim0`` in
    megatron/core/tensor_parallel/generalized_tensor_parallelism.py).
    """

    dim: int
    parts: int
    length: int

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """What ``rank`` of ``size`` keeps. Raises ``ValueError``."""
        if size % self.parts:
            raise ValueError(f"{size} ranks do not have {self.parts} parts equally often")
        total = length(dim_map)
        if self.parts * self.length < total:
            raise ValueError(f"a dim of {total} is longer than {self.parts} parts of {self.length}")
        start = rank % self.parts * self.length
        return take(dim_map, start, start + self.length)

    def __str__(self) -> str:
        return f"PartShard({self.dim}, {self.parts})"


@dataclasses.dataclass(frozen=True, slots=True)
class FlatShard:
    """Elements ``start .. end`` of the flattened tensor that the other axes left.

    The distributed optimizer lays all parameters of a bucket one after the other and gives each
    data-parallel rank an equal range, wherever that cuts (``_build_model_gbuf_param_range_map`` in
    megatron/core/optimizer/distrib_optimizer.py).
    """

    start: int
    end: int

    @classmethod
    def of_bucket(cls, offset: int, numel: int, bucket: int, rank: int, size: int) -> Self:
        """The part of one parameter that lies in a rank's range of a padded bucket.

        Megatron-FSDP divides its buckets so, whatever the strategy divides: optimizer states,
        gradients or parameters too (``build_data_parallel_buffer_index`` in
        megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py).

        The parameter's ``numel`` elements begin at ``offset`` in a padded bucket of ``bucket``
        elements, which ``size`` data-parallel ranks divide. The range is of the flattened
        parameter, and empty where ``rank`` holds nothing of it.
        Raises ``ValueError`` when the bucket does not divide or does not hold the parameter.
        """
        if bucket % size:
            raise ValueError(f"a bucket of {bucket} is not divisible by {size}")
        if offset < 0 or offset + numel > bucket:
            raise ValueError(f"{offset}..{offset + numel} exceeds a bucket of {bucket}")
        part = bucket // size
        start, end = (min(max(r * part - offset, 0), numel) for r in (rank, rank + 1))
        return cls(start, end)

    def boxes(self, dim_maps: Sequence[DimMap]) -> tuple[Box, ...]:
        """Boxes whose local side is an offset into the range. Raises ``ValueError``."""
        shape = [length(dim_map) for dim_map in dim_maps]
        total = math.prod(shape)
        if not 0 <= self.start <= self.end <= total:
            raise ValueError(f"flat range {self.start}..{self.end} exceeds a tensor of {total}")
        boxes: list[Box] = []
        offset = 0
        for origin, extent in rows(self.start, self.end, shape):
            for box in _split(origin, extent, dim_maps):
                boxes.append(dataclasses.replace(box, local=(offset,)))
                offset += box.numel
        return tuple(boxes)

    def __str__(self) -> str:
        return f"FlatShard({self.start}, {self.end})"


def _split(
    origin: tuple[int, ...], extent: tuple[int, ...], dim_maps: Sequence[DimMap]
) -> Iterator[Box]:
    """Cut one contiguous local block where the dim maps jump, keeping row-major order.

    Only the slowest ranging dim may be cut without reordering elements; where a faster dim jumps
    as well, the block is first cut into single rows.
    """
    ranges = [
        take(dim_map, start, start + size)
        for start, size, dim_map in zip(origin, extent, dim_maps, strict=True)
    ]
    jumping = [dim for dim, segments in enumerate(ranges) if len(segments) > 1]
    slowest = next((dim for dim, size in enumerate(extent) if size > 1), 0)
    if all(dim == slowest for dim in jumping):
        yield from product(ranges)
        return
    for row in range(origin[slowest], origin[slowest] + extent[slowest]):
        start = (*origin[:slowest], row, *origin[slowest + 1 :])
        yield from _split(start, (*extent[:slowest], 1, *extent[slowest + 1 :]), dim_maps)


DimPlacement = Shard | BlockShard | GroupShard | ZigZag | PartShard
Placement = DimPlacement | FlatShard
