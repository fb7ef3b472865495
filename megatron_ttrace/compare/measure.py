# SPDX-License-Identifier: Apache-2.0
"""The few sums a rank contributes about one of its tensors.

Boxes are walked in chunks that fit a core's cache; within a chunk the arithmetic is float32 (exact
for bf16 and fp16 inputs), across chunks the sums are float64. Only when a float32 chunk overflows
is it repeated in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from megatron_ttrace.placement.boxes import Box

_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """Sums over the elements of one rank's boxes; c candidate (divided by its factor), r reference.

    Attributes:
        n: number of elements.
        diff: sum of (c - r)^2.
        reference: sum of r^2.
        candidate: sum of c^2.
        dot: sum of c * r.
        worst: largest |c - r|.
        nonfinite: elements that are NaN or infinite in the candidate but finite in the reference.
        checksum: of the candidate's bits; replicas that agree bit for bit have equal checksums.
    """

    n: int = 0
    diff: float = 0.0
    reference: float = 0.0
    candidate: float = 0.0
    dot: float = 0.0
    worst: float = 0.0
    nonfinite: int = 0
    checksum: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            n=self.n + other.n,
            diff=self.diff + other.diff,
            reference=self.reference + other.reference,
            candidate=self.candidate + other.candidate,
            dot=self.dot + other.dot,
            worst=max(self.worst, other.worst),
            nonfinite=self.nonfinite + other.nonfinite,
            checksum=(self.checksum * 1_000_003 + other.checksum) & 0x7FFFFFFFFFFFFFFF,
        )


def box_views(
    local: torch.Tensor, logical: torch.Tensor, boxes: Sequence[Box]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each box its (local, logical) pair of equally shaped views."""
    for box in boxes:
        yield local_view(local, box), logical_view(logical, box)


def local_view(local: torch.Tensor, box: Box) -> torch.Tensor:
    """The local side of ``box`` as a view (of the logical box's shape)."""
    if box.is_flat:
        return local.reshape(-1).narrow(0, box.local[0], box.numel).view(box.extent)
    for dim, (start, size) in enumerate(zip(box.local, box.extent, strict=True)):
        local = local.narrow(dim, start, size)
    return local


def logical_view(logical: torch.Tensor, box: Box) -> torch.Tensor:
    """The logical side of ``box`` as a view."""
    for dim, (start, size) in enumerate(zip(box.logical, box.extent, strict=True)):
        logical = logical.narrow(dim, start, size)
    return logical


def measure(
    local: torch.Tensor, logical: torch.Tensor, boxes: Sequence[Box], factor: float = 1.0
) -> Sums:
    """Sums over all boxes of a local tensor against the logical one.

    Args:
        local: this rank's tensor, any strides, any device.
        logical: the reference's whole tensor; moved to ``local``'s device box by box.
        boxes: how they correspond.
        factor: expected candidate/reference ratio.
    """
    total = Sums()
    for here, there in box_views(local, logical, boxes):
        total = total + _measure_box(here, there, factor)
    return total


def checksum(data: torch.Tensor) -> int:
    """Order-dependent enough to tell replicas apart: a weighted sum of the bits."""
    flat = data.detach().contiguous().reshape(-1)
    if not flat.numel():
        return 0
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(words[flat.element_size()]) if flat.dtype != torch.bool else flat.byte()
    return int(bits.sum(dtype=torch.int64).item()) & 0x7FFFFFFFFFFFFFFF


def _measure_box(here: torch.Tensor, there: torch.Tensor, factor: float) -> Sums:
    here = here.detach()
    marks = checksum(here)
    if not here.numel():
        return Sums()
    if not here.is_floating_point():
        return _measure_discrete(here, there, marks)
    c_flat, r_flat = here.reshape(-1), there.reshape(-1)
    inverse = 1.0 / factor
    diff = reference = candidate = dot = worst = 0.0
    nonfinite = 0
    for start in range(0, c_flat.numel(), _CHUNK):
        c_chunk = c_flat[start : start + _CHUNK]
        r_chunk = r_flat[start : start + _CHUNK].to(c_chunk.device)
        sums = _chunk_sums(c_chunk, r_chunk, inverse, torch.float32)
        if not all(map(math.isfinite, sums)):
            bad = ~torch.isfinite(c_chunk.float()) & torch.isfinite(r_chunk.float())
            nonfinite += int(bad.sum().item())
            sums = _chunk_sums(c_chunk, r_chunk, inverse, torch.float64)
            if not all(map(math.isfinite, sums)):
                # Equal infinities and NaNs at the same places are agreement, not a difference.
                both = ~torch.isfinite(c_chunk.float()) & ~torch.isfinite(r_chunk.float())
                keep = ~(both | bad)
                sums = _chunk_sums(c_chunk[keep], r_chunk[keep], inverse, torch.float64)
        diff += sums[0]
        reference += sums[1]
        candidate += sums[2]
        dot += sums[3]
        worst = max(worst, sums[4])
    return Sums(
        n=c_flat.numel(),
        diff=diff,
        reference=reference,
        candidate=candidate,
        dot=dot,
        worst=worst,
        nonfinite=nonfinite,
        checksum=marks,
    )


def _chunk_sums(
    c_chunk: torch.Tensor, r_chunk: torch.Tensor, inverse: float, dtype: torch.dtype
) -> tuple[float, float, float, float, float]:
    if not c_chunk.numel():
        return (0.0, 0.0, 0.0, 0.0, 0.0)
    c = c_chunk.to(dtype)
    r = r_chunk.to(dtype)
    if inverse != 1.0:
        c = c * inverse
    d = c - r
    stacked = torch.stack(
        (torch.dot(d, d), torch.dot(r, r), torch.dot(c, c), torch.dot(c, r), d.abs().amax())
    )
    diff, reference, candidate, dot, worst = stacked.tolist()
    return diff, reference, candidate, dot, worst


def _measure_discrete(here: torch.Tensor, there: torch.Tensor, marks: int) -> Sums:
    """Integers and booleans are equal or not: every mismatch counts as an error of one."""
    mismatches = int((here != there.to(here.device)).sum().item())
    n = here.numel()
    return Sums(
        n=n,
        diff=float(mismatches),
        reference=float(n),
        candidate=float(n),
        dot=float(n - mismatches),
        worst=float(mismatches > 0),
        checksum=marks,
    )
