# SPDX-License-Identifier: Apache-2.0
"""Measure how far a captured tensor is from the part of the reference that it must equal.

On a GPU the sums are computed there, left there, and read later, many at a time, because a hook
that waits for the device stalls training's streams. :func:`launch` only queues work. Its result is
a row of int64 numbers on the device, float64 ones among them by their bits.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
import struct
from collections.abc import Sequence

import torch

from megatron_ttrace.compare.experts import Match
from megatron_ttrace.compare.measure import Sums, measure, plain_sums
from megatron_ttrace.compare.measured import Measured, fails
from megatron_ttrace.compare.sketch import sketch_of_share, sums_of_share
from megatron_ttrace.compare.tolerance import Tolerances, epsilon, is_stepped
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.checksum import MASK, weighted
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.records import MOMENTS, Kind
from megatron_ttrace.trace.staging import to_device
from megatron_ttrace.trace.store import TraceReader
from megatron_ttrace.trace.views import box_views, local_view, logical_view

TURNED = 2.1
"""What is turned around by rounding differs by twice its step."""
ROW = 8
"""diff, reference, candidate, dot, worst; nonfinite, undefined, checksum."""


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
    """The same with a sketch, if it may be a summand (compare/by_design.py) of what fails.

    Within a blind tolerance, the summand of another rank can be what fails.
    """
    if match.copies < 2 or measured.sketch:
        return measured
    is_blind = match.key.kind is Kind.GRAD_OUTPUT and tolerances.of(match.key).blind
    if not (is_blind or fails(measured.sums, tolerances, match.key)):
        return measured
    share = sketch_of_share(data, whole, match.boxes, match.factor, match.copies)
    return dataclasses.replace(measured, sketch=share)


def decided_only(
    measured: Measured, match: Match, data: torch.Tensor, reference: TraceReader, limits: Tolerances
) -> Measured:
    """The finding about an update, or a weight after it, without what rounding decides.

    Adam divides a mean of gradients by the root of the mean of their squares. In its first step
    from empty moments that is a sign: where a mean is no more than what it may be off, the weight
    moves by the whole learning rate to either side. The means are judged themselves.
    """
    key = match.key
    if not is_stepped(key) or measured.sums is None or not fails(measured.sums, limits, key):
        return measured
    known = [dataclasses.replace(key, kind=k, index=0) for k in (*MOMENTS, Kind.PARAM_DELTA)]
    if not all(each in reference for each in known):
        return measured
    limit = limits.of(known[0])
    whole, means, steps = (reference.data(each) for each in (key, known[0], known[-1]))
    if limit.blind or not means.shape == steps.shape == whole.shape:
        return measured
    norm, most = limit.rms * math.sqrt(limit.n), steps.abs().max()
    off = max(limit.value * limit.rms, limit.peak * norm)
    kept = data.detach().clone(memory_format=torch.contiguous_format).cpu()
    squares, number = 0.0, 0
    for box in match.boxes:
        here = local_view(kept, box)
        there, mean, step = (logical_view(each, box) for each in (whole, means, steps))
        far, mean, step = (here.float() - there.float()).abs(), mean.abs(), step.abs()
        # An element without any gradient is left alone, or decays. Later, a small mean is a small
        # step. One that is turned around is two steps off, and rounded.
        turned = (mean > 0) & (mean < off) & (step > most / 2) & (far > step / 2)
        turned &= far <= TURNED * step + epsilon(whole.dtype) * there.abs()
        here.copy_(torch.where(turned, there, here))
        squares += float(mean[turned].double().square().sum())
        number += int(turned.sum())
    others = measure(kept, whole, match.boxes)
    # To turn them all around, the mean had to be off by all of these.
    if math.sqrt(squares) > limit.value * norm or fails(others, limits, key):
        return measured
    others = dataclasses.replace(others, checksum=measured.sums.checksum)
    return dataclasses.replace(
        measured, sums=others, note=Note(Remark.UNDECIDED, number, whole.numel())
    )


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


def launch(
    local: torch.Tensor, logical: torch.Tensor, boxes: Sequence[Box], factor: float = 1.0
) -> torch.Tensor:
    """Queue what ``measure`` computes; arguments as there.

    Returns:
        On ``local``'s device, int64 of shape [number of boxes, 8], for :func:`read`.
    """
    rows = [
        _launch_box(here.detach().reshape(-1), to_device(there, here.device).reshape(-1), factor)
        for here, there in box_views(local, logical, boxes)
    ]
    return (
        torch.stack(rows) if rows else torch.empty(0, ROW, dtype=torch.int64, device=local.device)
    )


def read(rows: Sequence[Sequence[int]], boxes: Sequence[Box]) -> Sums:
    """The sums of a tensor from the rows of its boxes, which the caller brought to the host."""
    total = Sums()
    for box, row in zip(boxes, rows, strict=True):
        if box.numel:
            nonfinite, undefined, checksum = row[5:]
            numbers = (*as_floats(row[:5]), nonfinite, checksum & MASK, undefined)
            total = total + Sums.of((box.numel, *numbers))
    return total


def as_floats(bits: Sequence[int]) -> tuple[float, ...]:
    """float64 numbers from their bits."""
    return struct.unpack(f"{len(bits)}d", struct.pack(f"{len(bits)}q", *bits))


def _launch_box(here: torch.Tensor, there: torch.Tensor, factor: float) -> torch.Tensor:
    """One box's row: by the fused kernel where it can run, in plain PyTorch elsewhere."""
    if not here.numel():
        return torch.zeros(ROW, dtype=torch.int64, device=here.device)
    if here.is_cuda and _has_triton():
        from megatron_ttrace.compare import kernel

        if here.dtype in kernel.DTYPES and there.dtype in kernel.DTYPES:
            with torch.cuda.device(here.device):
                return kernel.fused_sums(here.contiguous(), there.contiguous(), factor)
    return plain_row(here, there, factor)


def plain_row(here: torch.Tensor, there: torch.Tensor, factor: float) -> torch.Tensor:
    """What the fused kernel computes, in plain PyTorch: any dtype, any device."""
    return torch.cat((plain_sums(here, there, factor), weighted(here).reshape(1)))


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
