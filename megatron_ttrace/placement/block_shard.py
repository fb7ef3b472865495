# SPDX-License-Identifier: Apache-2.0
"""``BlockShard(dim, blocks)``: the dim is several blocks laid side by side, each sharded alone.

A gated MLP stacks gate and up projection in ``linear_fc1`` (megatron/core/transformer/mlp.py).
Every rank chunks its *local* output into (gate, up), so rank r holds the r-th part of the gate
followed by the r-th part of the up projection, not the r-th part of the stack. Mamba's ``in_proj``
stacks blocks of different sizes in the same way (megatron/core/ssm/mamba_mixer.py).
"""

from __future__ import annotations

import dataclasses
import itertools

from megatron_ttrace.placement.boxes import DimMap, join, length, take
from megatron_ttrace.placement.shard import Shard


@dataclasses.dataclass(frozen=True, slots=True)
class BlockShard:
    """Blocks along ``dim``, each divided into equal contiguous parts.

    ``blocks`` is the number of equal blocks, or the shares of unequal ones: of ``(2, 1)`` the first
    is twice as long as the second.
    """

    dim: int
    blocks: int | tuple[int, ...] = 2

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """What ``rank`` of ``size`` keeps. Raises ``ValueError`` when a block does not divide."""
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
