# SPDX-License-Identifier: Apache-2.0
"""A single device steps matrices in the blocks of tensor-parallel ranks (own_shards.py)."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_ttrace.mcore.optimizer import owned_by
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import SINGLE, Mesh
from megatron_ttrace.trace.views import box_views

_MUON = "TensorParallelMuon"

type _Blocks = Mapping[int, Sequence[tuple[Box, ...]]]
"""The parts of a matrix on tensor-parallel ranks, by its id."""


def mesh_of_blocks(ranks: Sequence[int]) -> Mesh:
    """The ranks of :func:`own_shards.ranks_of_blocks` as a mesh."""
    tp, etp = ranks
    return dataclasses.replace(SINGLE, sizes=SINGLE.sizes._replace(tp=tp, etp=etp))


def step_in_blocks(
    optimizer: Any, places: Sequence[tuple[torch.nn.Parameter, ParameterPlace]], mesh: Mesh
) -> tuple[str, ...]:
    """Let Muon take each tensor-parallel rank's part of a matrix by itself.

    ``places``: of the parts on a rank of the mesh. Returns the names of the matrices that have
    several.
    """
    blocks: dict[int, list[tuple[Box, ...]]] = {}
    names: list[str] = []
    steppers: dict[int, Any] = {}
    owned = owned_by(optimizer)
    for parameter, place in places:
        held = owned.get(parameter)
        if held is None or not place.placement or type(held.inner).__name__ != _MUON:
            continue
        blocks[id(held.main)] = [*_on_ranks(place, mesh)]
        steppers[id(held.inner)] = held.inner
        names.append(place.name)
    for inner in steppers.values():
        inner.orthogonalize = functools.partial(_in_blocks, blocks, inner.orthogonalize)
    return tuple(names)


def _on_ranks(place: ParameterPlace, mesh: Mesh) -> Iterator[tuple[Box, ...]]:
    axis = place.placement[0].axis
    for rank in range(mesh.size(axis)):
        at = mesh.coordinates._replace(**{axis: rank})
        yield place.boxes(dataclasses.replace(mesh, coordinates=at))


def _in_blocks(
    blocks: _Blocks,
    orthogonalize: Callable[..., torch.Tensor],
    parameter: torch.Tensor,
    momentum: torch.Tensor,
    /,
    **more: Any,
) -> torch.Tensor:
    if id(parameter) not in blocks:
        return orthogonalize(parameter, momentum, **more)
    result = torch.empty_like(momentum)
    for boxes in blocks[id(parameter)]:
        ends = [map(sum, zip(box.local, box.extent, strict=True)) for box in boxes]
        block = momentum.new_empty([*map(max, zip(*ends, strict=True))])
        for part, whole in box_views(block, momentum, boxes):
            part.copy_(whole)
        for part, whole in box_views(orthogonalize(parameter, block, **more), result, boxes):
            whole.copy_(part)
    return result
