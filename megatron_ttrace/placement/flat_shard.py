# SPDX-License-Identifier: Apache-2.0
"""``FlatShard(start, end)``: ZeRO's range of a flattened local tensor.

The distributed optimizer lays all parameters of a bucket one after the other and gives each
data-parallel rank an equal range, wherever that cuts (megatron/core/optimizer/distrib_optimizer.py,
``_build_model_gbuf_param_range_map``). A range of a tensor-parallel shard's row-major elements is
cut into contiguous boxes here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from megatron_ttrace.placement.boxes import Box, DimMap, length, rows, take


@dataclasses.dataclass(frozen=True, slots=True)
class FlatShard:
    """Elements ``start .. end`` of the flattened tensor that the outer steps left."""

    start: int
    end: int

    def boxes(self, dim_maps: Sequence[DimMap]) -> tuple[Box, ...]:
        """Boxes whose local side is an offset into the flat range.

        Raises:
            ValueError: when the range leaves the tensor.
        """
        shape = [length(dim_map) for dim_map in dim_maps]
        total = 1
        for size in shape:
            total *= size
        if not 0 <= self.start <= self.end <= total:
            raise ValueError(f"flat range {self.start}..{self.end} exceeds a tensor of {total}")
        found, offset = [], 0
        for origin, extent in rows(self.start, self.end, shape):
            for box in _split(origin, extent, dim_maps):
                found.append(Box(box[0], box[1], (offset,)))
                offset += found[-1].numel
        return tuple(found)

    def __str__(self) -> str:
        return f"FlatShard({self.start}, {self.end})"


def _split(
    origin: tuple[int, ...], extent: tuple[int, ...], dim_maps: Sequence[DimMap]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
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
        return [
            (tuple(s.logical for s in chosen), tuple(s.length for s in chosen))
            for chosen in itertools.product(*ranges)
        ]
    return [
        piece
        for step in range(extent[slowest])
        for piece in _split(
            (*origin[:slowest], origin[slowest] + step, *origin[slowest + 1 :]),
            (*extent[:slowest], 1, *extent[slowest + 1 :]),
            dim_maps,
        )
    ]
