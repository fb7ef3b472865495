# SPDX-License-Identifier: Apache-2.0
"""What a perturbed replay moves: whole tensors, their elements, and rows of Adam's moments."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.placement.plan import Known
from megatron_ttrace.trace.records import MOMENTS, TraceKey

_BLOCK = 1 << 20
"""Elements that are compared at once."""


class ReplaySink(CompareSink):
    """Compares a step of one device with the reference.

    Attributes:
        rows: how far the row that moved farthest did, of each moment. In the gradient of an
            embedding, a frequent token's row is most of the tensor.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Prepare a comparison: see ``CompareSink``."""
        super().__init__(*arguments, **keywords)
        self.rows: dict[TraceKey, float] = {}

    def _compare(
        self,
        key: TraceKey,
        data: torch.Tensor,
        known: Known | None = None,
    ) -> None:
        super()._compare(key, data, known)
        measured = self._by_key.get(key)
        # A gradient's part is judged by its own size, which grows with a row's.
        if key.kind not in MOMENTS or measured is None or measured.problem:
            return
        ours, theirs = self._planner.oriented(key, data), self._reference.data(key)
        if ours.shape == theirs.shape and ours.dim() > 1:
            self.rows[key] = farthest_row(ours, theirs)


def farthest_row(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest distance of two rows (of the last dimension); 0 if one is not finite."""
    ours, theirs = (x.detach().flatten(0, -2) for x in (ours, theirs))
    rows = max(_BLOCK // max(ours.shape[1], 1), 1)
    farthest = torch.zeros((), device=ours.device)
    for here, there in zip(ours.split(rows), theirs.split(rows), strict=True):
        moved = here.float() - there.to(here.device).float()
        farthest = torch.maximum(farthest, torch.linalg.vector_norm(moved, dim=1).amax())
    return value if math.isfinite(value := float(farthest)) else 0.0
