# SPDX-License-Identifier: Apache-2.0
"""``Partial(op)``: every rank of the axis holds a full-shaped term of a sum (or mean).

No tensor that Megatron hands to the optimizer is partial; a gradient that *is* partial is what a
forgotten all-reduce looks like. So a partial placement is never compared as it stands: the
explanation "summing over the axis gives the reference" is tested with it. Where Megatron means a
tensor to be partial (experts' outputs under etp, a key that all heads share), the axis is kept
beside its placement, and the ranks' sum is judged (megatron_ttrace/compare/sketch.py).
"""

from __future__ import annotations

import dataclasses

from megatron_ttrace.placement.boxes import DimMap


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A term of a sum (``op`` "sum") or of a mean ("avg")."""

    op: str = "sum"

    def divide(self, dim_map: DimMap, rank: int, size: int) -> DimMap:
        """The shape stays whole on every rank."""
        del rank, size
        return dim_map

    def __str__(self) -> str:
        return f"Partial({self.op})"


def describe_partial(placement: str, axis: str) -> str:
    """The words for a tensor that is partial over an axis."""
    return f"{placement} {axis}:{Partial()}"
