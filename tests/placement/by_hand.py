# SPDX-License-Identifier: Apache-2.0
"""Tensors cut by hand, as Megatron's own code cuts them, and merged by hand, with numpy alone.

Nothing here uses the package's planning: it is the second, independent opinion on every placement.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.placements import FlatShard
from megatron_ttrace.placement.plan import Placements
from tests.placement.meshes import mesh_of


def meshes(**sizes: int) -> Iterator[Mesh]:
    """Every rank of a world that just holds the layout; ``dp=n`` makes it n times as large."""
    world = sizes.pop("dp", 1) * math.prod(sizes.values())
    for rank in range(world):
        yield mesh_of(rank, world, **sizes)


def chunk(whole: np.ndarray, dim: int, rank: int, size: int) -> np.ndarray:
    """The rank's part as ``torch.chunk`` makes it: tensor and sequence parallelism."""
    return np.split(whole, size, axis=dim)[rank]


def gated_chunk(
    whole: np.ndarray, dim: int, rank: int, size: int, blocks: int | tuple[int, ...] = 2
) -> np.ndarray:
    """Every block split by itself, then stacked: what a rank's gated ``linear_fc1`` holds."""
    if not isinstance(blocks, int):
        share = whole.shape[dim] // sum(blocks)
        blocks = [int(end) * share for end in np.cumsum(blocks)[:-1]]
    parts = [chunk(block, dim, rank, size) for block in np.split(whole, blocks, axis=dim)]
    return np.concatenate(parts, axis=dim)


def group_chunk(whole: np.ndarray, dim: int, rank: int, size: int, groups: int) -> np.ndarray:
    """``idx = rank // (world_size // num_query_groups)``, as Megatron's attention has it."""
    return chunk(whole, dim, rank // (size // groups), groups)


def zigzag(whole: np.ndarray, dim: int, rank: int, size: int) -> np.ndarray:
    """The lines of ``get_batch_on_this_cp_rank`` in megatron/core/utils.py, with numpy."""
    shape = whole.shape
    cut = whole.reshape(*shape[:dim], 2 * size, shape[dim] // (2 * size), *shape[dim + 1 :])
    chosen = np.take(cut, [rank, 2 * size - rank - 1], axis=dim)
    return chosen.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def numbered(*shape: int) -> np.ndarray:
    """A tensor whose every element is different."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.int64).reshape(shape)


class Assembled:
    """A logical tensor that ranks write their boxes into, and the number of writers."""

    def __init__(self, shape: Iterable[int]) -> None:
        self.values = np.zeros(tuple(shape), dtype=np.int64)
        self.holders = np.zeros(tuple(shape), dtype=np.int64)

    def write(self, local: np.ndarray, boxes: Iterable[Box]) -> None:
        """Write a rank's local tensor through its boxes; every local element exactly once."""
        used = np.zeros(local.shape, dtype=np.int64)
        for box in boxes:
            there = tuple(slice(s, s + n) for s, n in zip(box.logical, box.extent, strict=True))
            if box.is_flat:
                stop = box.local[0] + box.numel
                part = local.reshape(-1)[box.local[0] : stop].reshape(box.extent)
                used.reshape(-1)[box.local[0] : stop] += 1
            else:
                here = tuple(slice(s, s + n) for s, n in zip(box.local, box.extent, strict=True))
                part = local[here]
                used[here] += 1
            assert part.shape == tuple(box.extent)
            self.values[there] = part
            self.holders[there] += 1
        assert (used == 1).all()


def local_shape(shape: tuple[int, ...], placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The shape that a rank's tensor must have: an axis divides its dim evenly, or into groups."""
    left = list(shape)
    for step in placement:
        if isinstance(step.placement, FlatShard):
            return (step.placement.end - step.placement.start,)
        parts = getattr(step.placement, "parts", mesh.size(step.axis))
        left[step.placement.dim] //= parts
    return tuple(left)
