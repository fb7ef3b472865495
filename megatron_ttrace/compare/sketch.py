# SPDX-License-Identifier: Apache-2.0
"""Linear sketches: how far a sum of tensors on several ranks is from the reference.

With expert tensor parallelism some tensors are partial: a later collective adds them up. No rank
can judge its own alone, and gathering them would cost what the collective costs. A sketch is a
hundred numbers that add up like the tensors do: elements with random signs, summed into random
buckets (Charikar, Chen, Farach-Colton: Finding frequent items in data streams, 2002). The squared
norm of a sketch is an unbiased estimate of the tensor's, with a relative standard deviation of
``sqrt(2 / BUCKETS)``, 13 %: little beside a tolerance's factors.
"""

import functools
from collections.abc import Sequence

import torch

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.staging import to_device
from megatron_ttrace.trace.views import box_views

BUCKETS = 128
_BLOCK = 1 << 20
"""Elements that are summed at once: bounds the memory that this takes, and keeps."""


def sketch_of_share(
    local: torch.Tensor, logical: torch.Tensor, boxes: Sequence[Box], factor: float, ranks: int
) -> tuple[float, ...]:
    """The sketch of a rank's difference from an equal share of the reference.

    Arguments as of :func:`~megatron_ttrace.compare.measure.measure`, on any device; ``ranks`` add
    up to the whole.
    """
    return tuple(sums_of_share(local, logical, boxes, factor, ranks).tolist())


def sums_of_share(
    local: torch.Tensor, logical: torch.Tensor, boxes: Sequence[Box], factor: float, ranks: int
) -> torch.Tensor:
    """The same as float64 on ``local``'s device."""
    sums = torch.zeros(BUCKETS, dtype=torch.float64, device=local.device)
    number = 0
    for here, there in box_views(local, logical, boxes):
        for ours, theirs in zip(
            here.detach().reshape(-1).split(_BLOCK), there.reshape(-1).split(_BLOCK), strict=True
        ):
            error = ours.double() / factor - to_device(theirs, ours.device).double() / ranks
            drawn = to_device(_drawn(number, len(error)), error.device).long()
            sums.index_add_(0, drawn >> 1, error * (1 - 2 * (drawn & 1)))
            number += 1
    return sums


def squared_norm(sketches: list[tuple[float, ...]]) -> float:
    """The estimated sum of squares of the sum of the sketched tensors."""
    return float(sum(sum(column) ** 2 for column in zip(*sketches, strict=True)))


@functools.lru_cache(maxsize=64)
def _drawn(block: int, size: int) -> torch.Tensor:
    """Bucket and, in the lowest bit, sign of each element of a block, the same on every rank."""
    generator = torch.Generator().manual_seed(block * (_BLOCK + 1) + size)
    return torch.randint(0, 2 * BUCKETS, (size,), generator=generator, dtype=torch.uint8)
