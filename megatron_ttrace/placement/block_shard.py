# SPDX-License-Identifier: Apache-2.0
"""``BlockShard(dim, blocks)``: the dim is several blocks laid side by side, each sharded alone.

A gated MLP stacks gate and up projection in ``linear_fc1`` (megatron/core/transformer/mlp.py).
Every rank chunks its *local* output into (gate, up), so rank r holds the r-th part of the gate
followed by the r-th part of the up projection, not the r-th part of the stack.
"""

from __future__ import annotations

import dataclasses

from megatron_ttrace.placement.boxes import DimMap, join, length, take
from megatron_ttrace.placement.shard import Shard


@dataclasses.dataclass(frozen=True, slots=True)
class BlockShard:
    """``blocks`` equal blocks along ``dim``, each divided into equal contiguous parts."""

    dim: int
    blocks: int = 2

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """What ``rank`` of ``size`` keeps. Raises ``ValueError`` when a block does not divide."""
        total = length(dim_map)
        if total % self.blocks:
            raise ValueError(f"a dim of {total} does not divide into {self.blocks} equal blocks")
        block = total // self.blocks
        parts = [take(dim_map, index * block, (index + 1) * block) for index in range(self.blocks)]
        return join([Shard(self.dim).divide(part, rank, size) for part in parts])

    def __str__(self) -> str:
        return f"BlockShard({self.dim}, {self.blocks})"
