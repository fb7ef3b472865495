# SPDX-License-Identifier: Apache-2.0
"""Measure how far a captured tensor is from the part of the reference that it must equal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from megatron_ttrace.compare.device import ROW, as_floats, launch, read
from megatron_ttrace.compare.experts import Match
from megatron_ttrace.compare.measure import Sums, measure
from megatron_ttrace.compare.measured import Measured, fails
from megatron_ttrace.compare.sketch import sketch_of_share, sums_of_share
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.trace.store import TraceReader


def compare(reference: TraceReader, match: Match, data: torch.Tensor) -> Measured:
    """What is found out about one planned part of ``data``; on a device, sums stay there."""
    whole = reference.data(match.key)
    share = (data, whole, match.boxes, match.factor, match.partial_ranks)
    if data.device.type == "cpu":
        measured = match.measured(measure(data, whole, match.boxes, match.factor))
        if not match.partial_over:
            return measured
        return dataclasses.replace(measured, sketch=sketch_of_share(*share))
    unread = launch(data, whole, match.boxes, match.factor).reshape(-1)
    if match.partial_over:
        unread = torch.cat((unread, sums_of_share(*share).view(torch.int64)))
    return dataclasses.replace(match.measured(Sums()), unread=unread)


def with_share(
    measured: Measured,
    match: Match,
    data: torch.Tensor,
    whole: torch.Tensor,
    tolerances: Tolerances,
) -> Measured:
    """The same with a sketch, if it fails and may be a summand (compare/by_design.py)."""
    if match.copies < 2 or measured.sketch or not fails(measured.sums, tolerances, match.key):
        return measured
    share = sketch_of_share(data, whole, match.boxes, match.factor, match.copies)
    return dataclasses.replace(measured, sketch=share)


def read_back(measured: Sequence[Measured]) -> list[Measured]:
    """The same findings with their sums, which are brought from the device in one copy."""
    waiting = [tensor.unread for tensor in measured if tensor.unread is not None]
    if not waiting:
        return list(measured)
    if waiting[0].is_cuda:
        torch.cuda.synchronize()  # backward hooks run on the streams of what they hook
    numbers = iter(torch.cat(waiting).cpu().tolist())
    settled = []
    for tensor in measured:
        if tensor.unread is not None:
            mine = list(itertools.islice(numbers, tensor.unread.numel()))
            rows = ROW * len(tensor.boxes)
            tensor = dataclasses.replace(
                tensor,
                sums=read(list(itertools.batched(mine[:rows], ROW)), tensor.boxes),
                sketch=as_floats(mine[rows:]),
                unread=None,
            )
        settled.append(tensor)
    return settled
