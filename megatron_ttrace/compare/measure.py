# SPDX-License-Identifier: Apache-2.0
"""The few sums a rank contributes about one of its tensors.

All arithmetic is in float64. On a CPU ``sums.c`` reads a tensor once: bits are compared first, and
of a block that is bitwise equal to its reference only the norm is computed. On a GPU the kernel of
``kernel.py`` does that. What neither can read, PyTorch reads several times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_ttrace.compare import native
from megatron_ttrace.compare.native import blocks, checksum_of
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.checksum import joined
from megatron_ttrace.trace.codec import Count, Word
from megatron_ttrace.trace.moments import Total
from megatron_ttrace.trace.views import box_views, same_bits


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
        checksum: of the candidate's bits; on a CPU 0 where these are the reference's. Replicas
            that agree bit for bit have equal checksums, and only they.
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
            checksum=joined(self.checksum, other.checksum),
            undefined=self.undefined + other.undefined,
        )


def measure(
    local: torch.Tensor, logical: torch.Tensor, boxes: Sequence[Box], factor: float = 1.0
) -> Sums:
    """Sums over all boxes of a local tensor against the logical one.

    Args:
        local: this rank's tensor, any strides, on a CPU (of others: compare/device.py).
        logical: the reference's whole tensor, likewise.
        boxes: how they correspond.
        factor: expected candidate/reference ratio.
    """
    local = local.detach() if local.requires_grad else local
    pairs = box_views(local, logical, boxes)
    sums = [_measure_box(here, there, factor) for here, there in pairs]
    return sums[0] if len(sums) == 1 else sum(sums, Sums())


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


def _measure_box(here: torch.Tensor, there: torch.Tensor, factor: float) -> Sums:
    if not here.numel():
        return Sums()
    compiled = native.sums(here, there, 1.0 / factor)
    if compiled is not None:
        numbers, digest = compiled
        return Sums(here.numel(), *numbers, checksum=digest)
    row = plain_sums(here, there, factor)
    digest = 0 if factor == 1.0 and same_bits(here, there) else checksum_of(here)
    nonfinite, undefined = row[5:].tolist()
    diff, reference, candidate, dot, worst = row[:5].view(torch.float64).tolist()
    return Sums(
        *(here.numel(), diff, reference, candidate, dot, worst, nonfinite, digest, undefined)
    )


def plain_sums(here: torch.Tensor, there: torch.Tensor, factor: float) -> torch.Tensor:
    """The sums of two tensors of one shape, in PyTorch: any dtype, any device, several passes.

    Integers and booleans are equal or not: every mismatch counts as an error of one. Equal
    infinities and NaNs at the same places are agreement, not a difference.

    Returns:
        On ``here``'s device, int64 of shape [7]; nothing is read back. The bits, as float64, of
        diff, reference, candidate, dot and worst; then nonfinite and undefined.
    """
    if not here.is_floating_point():
        differ = (here != there).sum()
        wrong = differ.double()
        total = torch.full_like(wrong, here.numel())
        floats = (wrong, total, total, total - wrong, (wrong > 0).double())
        return torch.cat((torch.stack(floats).view(torch.int64), differ.new_zeros(2)))
    sums = torch.zeros(4, dtype=torch.float64, device=here.device)
    worst = sums.new_zeros(1)
    counts = torch.zeros(2, dtype=torch.int64, device=here.device)
    for ours, theirs in blocks(here, there):
        c, r = ours.double().view(-1), theirs.double().view(-1)
        finite = torch.isfinite(c) & torch.isfinite(r)
        undefined = torch.isnan(c) & torch.isnan(r)
        agree = finite | (c == r) | undefined
        counts += torch.stack(((~agree).sum(), undefined.sum()))
        c = torch.where(finite, c, 0.0) * (1.0 / factor)
        r = torch.where(finite, r, 0.0)
        d = c - r
        sums += torch.stack((d.dot(d), r.dot(r), c.dot(c), c.dot(r)))
        worst = torch.maximum(worst, d.abs().amax())
    return torch.cat((torch.cat((sums, worst)).view(torch.int64), counts))
