# SPDX-License-Identifier: Apache-2.0
"""From a placement to boxes."""

import dataclasses
from collections.abc import Sequence

from megatron_ttrace.placement.boxes import Box, DimMap, product, whole
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.placements import FlatShard, GroupShard, Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One mesh axis' division of a tensor."""

    axis: str
    placement: Placement

    def __str__(self) -> str:
        return f"{self.axis}:{self.placement}"


Placements = tuple[Step, ...]
"""Steps, outermost first. Axes that are not named replicate. A ``FlatShard`` comes last."""
Known = tuple[tuple[int, ...], Placements]
"""The logical shape and the placement of a tensor."""


def describe(placement: Placements) -> str:
    """``"cp:ZigZag(0) tp:Shard(0)"``; ``"Replicate"`` for the empty placement."""
    return " ".join(map(str, placement)) or "Replicate"


def describe_partial(words: str, axis: str) -> str:
    """``"Replicate tp:Partial(sum)"``: a tensor that is partial over an axis, if there is one."""
    return f"{words} {axis}:Partial(sum)" if axis else words


def copies(placement: Placements, axis: str, mesh: Mesh) -> int:
    """How many ranks along ``axis`` have the same elements, where it may also divide them."""
    rules = [step.placement for step in placement if step.axis == axis]
    parts = [rule.parts if isinstance(rule, GroupShard) else mesh.size(axis) for rule in rules]
    return mesh.size(axis) // max(parts, default=1)


def plan(logical_shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[Box, ...]:
    """The boxes of this rank's local tensor.

    Raises ``ValueError`` when the shape does not divide as the placement says.
    """
    flat = placement[-1].placement if placement else None
    if isinstance(flat, FlatShard):
        return flat.boxes(dims_of(logical_shape, placement[:-1], mesh))
    return product(dims_of(logical_shape, placement, mesh))


def dims_of(logical_shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[DimMap, ...]:
    """The dims of this rank's local tensor, for a placement without a ``FlatShard``.

    Raises ``ValueError`` as :func:`plan` does, and for a ``FlatShard``.
    """
    dim_maps = [whole(size) for size in logical_shape]
    for step in placement:
        if isinstance(step.placement, FlatShard):
            raise ValueError("FlatShard must be the last step of a placement")
        dim, rank, size = step.placement.dim, mesh.at(step.axis), mesh.size(step.axis)
        if not 0 <= dim < len(dim_maps):
            raise ValueError(f"{step} names a dim that a tensor {tuple(logical_shape)} lacks")
        dim_maps[dim] = step.placement.divide(dim_maps[dim], rank, size)
    return tuple(dim_maps)
