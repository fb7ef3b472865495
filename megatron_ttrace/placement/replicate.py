# SPDX-License-Identifier: Apache-2.0
"""``Replicate``: every rank of the axis holds the same values; each one is compared."""

from __future__ import annotations

import dataclasses

from megatron_ttrace.placement.boxes import DimMap


@dataclasses.dataclass(frozen=True, slots=True)
class Replicate:
    """The axis does not divide the tensor."""

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """Everything, on every rank."""
        del rank, size
        return dim_map

    def __str__(self) -> str:
        return "Replicate"
