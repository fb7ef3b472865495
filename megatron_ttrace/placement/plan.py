# SPDX-License-Identifier: Apache-2.0
"""From a placement to boxes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_ttrace.placement.block_shard import BlockShard
from megatron_ttrace.placement.boxes import Box, DimMap, length, product, whole
from megatron_ttrace.placement.flat_shard import FlatShard
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.shard import Shard
from megatron_ttrace.placement.zigzag import ZigZag

DimPlacement = Shard | BlockShard | ZigZag
Placement = DimPlacement | FlatShard
"""What one mesh axis does to a tensor, as DTensor uses the word."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One mesh axis' division of a tensor."""

    axis: str
    rule: Placement

    def __str__(self) -> str:
        return f"{self.axis}:{self.rule}"


Placements = tuple[Step, ...]
"""Steps, outermost first. Axes that are not named replicate. A ``FlatShard`` comes last."""


def describe(placement: Placements) -> str:
    """``"cp:ZigZag(0) tp:Shard(0)"``; ``"Replicate"`` for the empty placement."""
    return " ".join(str(step) for step in placement) or "Replicate"


def _dim_maps(
    logical_shape: Sequence[int], placement: Placements, mesh: Mesh
) -> tuple[list[DimMap], FlatShard | None]:
    dim_maps = [whole(size) for size in logical_shape]
    for position, step in enumerate(placement):
        if isinstance(step.rule, FlatShard):
            if position != len(placement) - 1:
                raise ValueError("FlatShard must be the last step of a placement")
            return dim_maps, step.rule
        dim = step.rule.dim
        if not 0 <= dim < len(dim_maps):
            raise ValueError(f"{step} names a dim that a tensor {tuple(logical_shape)} lacks")
        dim_maps[dim] = step.rule.divide(dim_maps[dim], mesh.at(step.axis), mesh.size(step.axis))
    return dim_maps, None


def plan(logical_shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[Box, ...]:
    """The boxes of this rank's local tensor.

    Raises:
        ValueError: when the shape does not divide as the placement says.
    """
    dim_maps, flat = _dim_maps(logical_shape, placement, mesh)
    return flat.boxes(dim_maps) if flat is not None else product(dim_maps)


def local_shape(logical_shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The shape that the local tensor must have. Raises ``ValueError`` as :func:`plan` does."""
    dim_maps, flat = _dim_maps(logical_shape, placement, mesh)
    if flat is not None:
        return (flat.end - flat.start,)
    return tuple(length(dim_map) for dim_map in dim_maps)


def dims_of(logical_shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[DimMap, ...]:
    """The dims of this rank's local tensor, for a placement without a ``FlatShard``.

    Raises:
        ValueError: as :func:`plan` does, and for a ``FlatShard``.
    """
    dim_maps, flat = _dim_maps(logical_shape, placement, mesh)
    if flat is not None:
        raise ValueError("a flat range has no dims")
    return tuple(dim_maps)
