# SPDX-License-Identifier: Apache-2.0
"""``ZigZag(dim)``: context parallelism's division of the sequence.

The sequence is cut into 2n chunks and rank r of n holds chunks r and 2n-1-r, so that causal
attention costs every rank the same (``get_batch_on_this_cp_rank`` in megatron/core/utils.py).
"""

from __future__ import annotations

import dataclasses

from megatron_ttrace.placement.boxes import DimMap, join, length, take


@dataclasses.dataclass(frozen=True, slots=True)
class ZigZag:
    """Chunks ``r`` and ``2n-1-r`` of ``2n`` equal chunks of ``dim``."""

    dim: int

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """What ``rank`` of ``size`` keeps. Raises ``ValueError`` when the dim does not divide."""
        total = length(dim_map)
        if total % (2 * size):
            raise ValueError(f"a sequence of {total} does not divide into {2 * size} chunks")
        chunk = total // (2 * size)
        back = 2 * size - 1 - rank
        return join(
            [
                take(dim_map, rank * chunk, (rank + 1) * chunk),
                take(dim_map, back * chunk, (back + 1) * chunk),
            ]
        )

    def __str__(self) -> str:
        return f"ZigZag({self.dim})"
