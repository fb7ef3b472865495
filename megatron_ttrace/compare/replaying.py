# SPDX-License-Identifier: Apache-2.0
"""What a perturbed replay moves: whole tensors, their elements, and rows of Adam's moments."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.placement.plan import Known
from megatron_ttrace.trace.records import MOMENTS, Kind, TraceKey
from megatron_ttrace.trace.store import TraceReader

_BLOCK = 1 << 20
"""Elements that are compared at once."""


class ReplaySink(CompareSink):
    """Compares a step of one device with the reference.

    Attributes:
        rows: how far the row that moved farthest did, of each moment. In the gradient of an
            embedding, a frequent token's row is most of the tensor.
    """

    def __init__(
        self,
        reader: TraceReader,
        iteration: int,
        layout: RankLayout,
        gives_gradients: bool = False,
        **keywords: Any,
    ) -> None:
        """Prepare a comparison: see ``CompareSink``.

        ``gives_gradients``: when isolating, the optimizer gets the reference's. Otherwise replays
        show how far rounded gradients move its results.
        """
        super().__init__(reader, iteration, layout, **keywords)
        self._gives_gradients = gives_gradients
        self.rows: dict[TraceKey, float] = {}

    def _gives(self, kind: Kind) -> bool:
        return self._gives_gradients and super()._gives(kind)

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
