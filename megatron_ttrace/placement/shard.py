# SPDX-License-Identifier: Apache-2.0
"""``Shard(dim)``: rank r of n holds the r-th of n equal, contiguous parts of a dim.

Tensor parallelism divides weights and hidden dims so (megatron/core/tensor_parallel/layers.py),
sequence parallelism divides dim 0 of activations so (mappings.py).
"""

from __future__ import annotations

import dataclasses

from megatron_ttrace.placement.boxes import DimMap, length, take


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Equal contiguous parts of ``dim``."""

    dim: int

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """What ``rank`` of ``size`` keeps. Raises ``ValueError`` when the dim does not divide."""
        total = length(dim_map)
        if total % size:
            raise ValueError(f"a dim of {total} is not divisible by {size}")
        part = total // size
        return take(dim_map, rank * part, (rank + 1) * part)

    def __str__(self) -> str:
        return f"Shard({self.dim})"
