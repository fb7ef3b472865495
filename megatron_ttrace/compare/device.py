# SPDX-License-Identifier: Apache-2.0
"""The sums of tensors on a GPU: computed there, left there, and read later, many at a time.

A hook that waits for the device stalls training's streams. So :func:`launch` only queues work, and
its result is a row of int64 numbers on the device, float64 ones among them by their bits.
"""

from __future__ import annotations

import functools
import importlib.util
import struct
from collections.abc import Sequence

import torch

from megatron_ttrace.compare.measure import Sums, plain_sums
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.checksum import MASK, weighted
from megatron_ttrace.trace.staging import to_device
from megatron_ttrace.trace.views import box_views

ROW = 8
"""diff, reference, candidate, dot, worst; nonfinite, undefined, checksum."""


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
