# SPDX-License-Identifier: Apache-2.0
"""The few sums a rank contributes about one of its tensors.

Boxes are walked in chunks that fit a core's cache; within a chunk the arithmetic is float32 (exact
for bf16 and fp16 inputs), across chunks the sums are float64. A chunk whose squares overflow or
underflow float32 (second moments of small gradients do) is repeated in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import Bounds, Count, Word

Total = Annotated[float, Bounds(0.0, nan=True)]
"""A sum of squares, or a largest difference."""

_CHUNK = 1 << 16
_UNDERFLOW = 1e-24
"""Below this a float32 sum of a chunk's squares may have lost some of them."""
WORDS = 1 << 15
"""64-bit words that a checksum weighs at a time."""
BASE = 1_000_003
"""By which a checksum so far is multiplied before more is added."""
MASK = (1 << 64) - 1


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
        nonfinite: elements that are NaN or infinite on one side and not just so on the other.
        checksum: of the candidate's bits; replicas that agree bit for bit have equal checksums.
        undefined: elements that are NaN on both sides: no difference, and no evidence either.
    """

    n: Count = 0
    diff: Total = 0.0
    reference: Total = 0.0
    candidate: Total = 0.0
    dot: float = 0.0
    worst: Total = 0.0
    nonfinite: Count = 0
    checksum: Word = 0
    undefined: Count = 0

    @classmethod
    def of(cls, values: Any) -> Sums:
        """The inverse of ``dataclasses.astuple``, also as JSON. Raises ``CodecError``."""
        return codec.decode_list(cls, values)

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            n=self.n + other.n,
            diff=self.diff + other.diff,
            reference=self.reference + other.reference,
            candidate=self.candidate + other.candidate,
            dot=self.dot + other.dot,
            worst=max(self.worst, other.worst),
            nonfinite=self.nonfinite + other.nonfinite,
            checksum=(self.checksum * BASE + other.checksum) & MASK,
            undefined=self.undefined + other.undefined,
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


def relative_error(sums: Sums, rms: float) -> float:
    """The relative error of one rank's part of a tensor: what is held against its tolerance.

    ``rms(c - r over the part) / max(rms(r over the part), rms(r over the whole tensor))``. For a
    part that is the whole tensor this is ``||c - r|| / ||r||``. For a smaller part, dividing by the
    part's own size finds a wrong shard however many ranks there are, and a part that happens to be
    nearly zero is not judged against itself. Sums that are no numbers are an infinite error.
    """
    if sums.n == 0 or sums.diff == 0.0:
        return 0.0
    scale = scale_of(sums, rms)
    error = math.sqrt(sums.diff / sums.n) / scale if scale else math.inf
    return math.inf if math.isnan(error) else error


def scale_of(sums: Sums, rms: float) -> float:
    """What the root mean square of a part's difference is divided by; ``sums.n`` is not zero."""
    return max(math.sqrt(sums.reference / sums.n), rms)


def checksum(data: torch.Tensor) -> int:
    """A position-weighted sum of the bits: replicas with swapped rows differ, too."""
    flat = data.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    total = int.from_bytes(bytes(flat[whole:].cpu().tolist()), "little")
    for start in range(0, words.numel(), WORDS):
        part = words[start : start + WORDS]
        weights = checksum_weights(part.device)[:, : part.numel()]
        # Products wrap around: high bits alone would weigh too little, so they count again, lower.
        dots = _dot(part, weights[0]), _dot(part >> 32, weights[1])
        for dot in dots:
            total = (total * BASE + int(dot.item())) & MASK
    return total


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # There is no integer dot product on GPUs; on CPUs it is several times faster than a sum.
    return torch.dot(a, b) if a.device.type == "cpu" else (a * b).sum()


@functools.cache
def checksum_weights(device: torch.device) -> torch.Tensor:
    """Two rows of odd 64-bit weights: a single changed word always changes the sum."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (2, WORDS), generator=generator)
    return (drawn | 1).to(device)


def _measure_box(here: torch.Tensor, there: torch.Tensor, factor: float) -> Sums:
    here = here.detach()
    if not here.numel():
        return Sums()
    marks = checksum(here)
    if not here.is_floating_point():
        return _measure_discrete(here, there, marks)
    c_flat, r_flat = here.reshape(-1), there.reshape(-1)
    inverse = 1.0 / factor
    double = torch.float64 in (here.dtype, there.dtype)
    totals, worst = [0.0] * 4, 0.0
    nonfinite = undefined = 0
    for start in range(0, c_flat.numel(), _CHUNK):
        c_chunk = c_flat[start : start + _CHUNK]
        r_chunk = r_flat[start : start + _CHUNK].to(c_chunk.device)
        if double or not _is_sound(sums := _chunk_sums(c_chunk, r_chunk, inverse, torch.float32)):
            sums = _chunk_sums(c_chunk, r_chunk, inverse, torch.float64)
        if not all(map(math.isfinite, sums)):
            c_chunk, r_chunk, bad, nan = _finite_only(c_chunk, r_chunk)
            nonfinite += bad
            undefined += nan
            sums = _chunk_sums(c_chunk, r_chunk, inverse, torch.float64)
        totals = [total + one for total, one in zip(totals, sums[:4], strict=True)]
        worst = max(worst, sums[4])
    diff, reference, candidate, dot = totals
    n = c_flat.numel()
    return Sums(n, diff, reference, candidate, dot, worst, nonfinite, marks, undefined)


def _is_sound(sums: Sequence[float]) -> bool:
    """Whether float32 neither overflowed nor underflowed in these sums."""
    diff, reference, candidate, _, worst = sums
    return (
        all(map(math.isfinite, sums))
        and min(reference, candidate) > _UNDERFLOW
        and (worst == 0.0 or diff > _UNDERFLOW)
    )


def _finite_only(c: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """The elements that are finite on both sides; how many disagree elsewhere; how many NaN agree.

    Equal infinities and NaNs at the same places are agreement, not a difference.
    """
    c, r = c.double(), r.double()
    finite = torch.isfinite(c) & torch.isfinite(r)
    undefined = torch.isnan(c) & torch.isnan(r)
    agree = finite | (c == r) | undefined
    return c[finite], r[finite], int((~agree).sum().item()), int(undefined.sum().item())


def _chunk_sums(
    c_chunk: torch.Tensor, r_chunk: torch.Tensor, inverse: float, dtype: torch.dtype
) -> list[float]:
    """Sums of a chunk: of (c - r)^2, r^2, c^2 and c * r, and the largest |c - r|."""
    if not c_chunk.numel():
        return [0.0] * 5
    c, r = c_chunk.to(dtype), r_chunk.to(dtype)
    if inverse != 1.0:
        c = c * inverse
    d = c - r
    found: list[float] = torch.stack(
        (torch.dot(d, d), torch.dot(r, r), torch.dot(c, c), torch.dot(c, r), d.abs().amax())
    ).tolist()
    return found


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
