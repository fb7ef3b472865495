# SPDX-License-Identifier: Apache-2.0
"""Measure how far a captured tensor is from the part of the reference that it must equal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from megatron_ttrace.compare.device import ROW, as_floats, launch, read
from megatron_ttrace.compare.measure import Sums, measure
from megatron_ttrace.compare.measured import Measured, fails
from megatron_ttrace.compare.planning import Match
from megatron_ttrace.compare.sketch import sketch_of_share, sums_of_share
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.trace.store import TraceReader


def compare(reference: TraceReader, match: Match, data: torch.Tensor) -> Measured:
    """What is found out about one planned part of ``data``; on a device, sums stay there."""
    whole = reference.data(match.key)
    sketch: tuple[float, ...] = ()
    unread: torch.Tensor | None = None
    share = (data, whole, match.boxes, match.factor, match.partial_ranks)
    if data.device.type == "cpu":
        sums = measure(data, whole, match.boxes, match.factor)
        sketch = sketch_of_share(*share) if match.partial_over else ()
    else:
        sums = Sums()
        unread = launch(data, whole, match.boxes, match.factor).reshape(-1)
        if match.partial_over:
            unread = torch.cat((unread, sums_of_share(*share).view(torch.int64)))
    return Measured(
        match.key,
        match.placement,
        match.boxes,
        match.logical_shape,
        sums,
        sketch=sketch,
        partial_over=match.partial_over,
        unread=unread,
    )


def with_share(
    found: Measured, match: Match, data: torch.Tensor, whole: torch.Tensor, tolerances: Tolerances
) -> Measured:
    """The same with a sketch, if it fails and may be a summand (compare/by_design.py)."""
    if match.copies < 2 or found.sketch or not fails(found.sums, tolerances, match.key):
        return found
    share = sketch_of_share(data, whole, match.boxes, match.factor, match.copies)
    return dataclasses.replace(found, sketch=share)


def read_back(found: Sequence[Measured]) -> list[Measured]:
    """The same findings with their sums, which are brought from the device in one copy."""
    waiting = [one.unread for one in found if one.unread is not None]
    if not waiting:
        return list(found)
    if waiting[0].is_cuda:
        torch.cuda.synchronize()  # backward hooks run on the streams of what they hook
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
