# SPDX-License-Identifier: Apache-2.0
"""Measure how far a captured tensor is from the part of the reference that it must equal."""

from __future__ import annotations

import torch

from megatron_ttrace.compare.measure import measure
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.planning import Match
from megatron_ttrace.compare.sketch import sketch_of_share
from megatron_ttrace.trace.store import TraceReader


def compare(reference: TraceReader, match: Match, data: torch.Tensor) -> Measured:
    """What is found out about one planned part of ``data``."""
    whole = reference.tensor(reference.entry(match.key))
    share: tuple[float, ...] = ()
    if match.partial_over:
        share = sketch_of_share(data, whole, match.boxes, match.factor, match.partial_ranks)
    return Measured(
        match.key,
        match.placement,
        match.boxes,
        match.logical_shape,
        measure(data, whole, match.boxes, match.factor),
        sketch=share,
        partial_over=match.partial_over,
    )
