# SPDX-License-Identifier: Apache-2.0
"""Measure how far a captured tensor is from the part of the reference that it must equal."""

from __future__ import annotations

import torch

from megatron_ttrace.compare.measure import measure
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.planning import Match, Misfit
from megatron_ttrace.compare.sketch import sketch_of_share
from megatron_ttrace.trace.store import TraceReader


class Comparator:
    """Measures against one reference; it decides nothing and keeps nothing."""

    def __init__(self, reference: TraceReader) -> None:
        self._reference = reference

    def compare(self, match: Match | Misfit, data: torch.Tensor) -> Measured:
        """The finding on one planned part of ``data``."""
        if isinstance(match, Misfit):
            return Measured(match.key, "", (), match.logical_shape, None, match.problem, match.note)
        whole = self._reference.tensor(self._reference.entry(match.key))
        sums = measure(data, whole, match.boxes, match.factor)
        share: tuple[float, ...] = ()
        if match.partial_over:
            share = sketch_of_share(data, whole, match.boxes, match.factor, match.partial_ranks)
        return Measured(
            match.key,
            match.placement,
            match.boxes,
            match.logical_shape,
            sums,
            sketch=share,
            partial_over=match.partial_over,
        )
