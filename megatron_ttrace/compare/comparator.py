# SPDX-License-Identifier: Apache-2.0
"""Measure how far a captured tensor is from the part of the reference that it must equal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from megatron_ttrace.compare.device import ROW, as_floats, launch, read
from megatron_ttrace.compare.measure import Sums, measure
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.planning import Match, Misfit
from megatron_ttrace.compare.sketch import sketch_of_share, sums_of_share
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
        if data.device.type != "cpu":
            return self._launch(match, data, whole)
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

    def _launch(self, match: Match, data: torch.Tensor, whole: torch.Tensor) -> Measured:
        """The finding whose sums are left on ``data``'s device."""
        unread = launch(data, whole, match.boxes, match.factor).reshape(-1)
        if match.partial_over:
            share = sums_of_share(data, whole, match.boxes, match.factor, match.partial_ranks)
            unread = torch.cat((unread, share.view(torch.int64)))
        return Measured(
            match.key,
            match.placement,
            match.boxes,
            match.logical_shape,
            Sums(),
            partial_over=match.partial_over,
            unread=unread,
        )


def read_back(found: Sequence[Measured]) -> list[Measured]:
    """The same findings with their sums, which are brought from the device in one copy."""
    waiting = [one.unread for one in found if one.unread is not None]
    if not waiting:
        return list(found)
    numbers = iter(torch.cat(waiting).cpu().tolist())
    settled = []
    for one in found:
        if one.unread is not None:
            mine = list(itertools.islice(numbers, one.unread.numel()))
            rows = ROW * len(one.boxes)
            one = dataclasses.replace(
                one,
                sums=read([mine[at : at + ROW] for at in range(0, rows, ROW)], one.boxes),
                sketch=as_floats(mine[rows:]),
                unread=None,
            )
        settled.append(one)
    return settled
