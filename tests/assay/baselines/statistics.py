# SPDX-License-Identifier: Apache-2.0
"""What the rules need to know of a tensor: sums, extremes, and elements out of bounds.

Other tools compare whole tensors, so the candidate's shards are merged first. Of replicas, the one
that differs most is used, so that a rule has the best chance to see an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

import torch

from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader
from megatron_ttrace.trace.views import local_view, logical_view
from tests.assay.planting import SavedShard

ASSERT_CLOSE = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}
"""(rtol, atol) of ``torch.testing.assert_close`` by dtype, from its documentation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """A merged candidate tensor c against the reference's r; all numbers in float64.

    ``far`` counts elements beyond ``torch.testing.assert_close``'s defaults for the dtype.
    ``nonfinite`` counts elements of c that are NaN or infinite where r is not.
    """

    n: int
    diff: float
    reference: float
    candidate: float
    extremes: tuple[float, float, float]
    reference_extremes: tuple[float, float, float]
    far: int
    nonfinite: int

    @property
    def relative_error(self) -> float:
        """``||c - r|| / ||r||``."""
        if self.diff == 0.0:
            return 0.0
        return math.sqrt(self.diff / self.reference) if self.reference else math.inf


def statistics(candidate: torch.Tensor, reference: torch.Tensor) -> Stats:
    """Compare two whole tensors of one shape; what no rank holds is NaN in ``candidate``."""
    dtype = reference.dtype
    c, r = candidate.reshape(-1).double(), reference.reshape(-1).double()
    finite = torch.isfinite(c) & torch.isfinite(r)
    bad = int((~torch.isfinite(c) & torch.isfinite(r)).sum())
    c, r = c[finite], r[finite]
    if not c.numel():
        return Stats(0, 0.0, 0.0, 0.0, (0.0,) * 3, (0.0,) * 3, 0, bad)
    d = c - r
    rtol, atol = ASSERT_CLOSE.get(dtype, ASSERT_CLOSE[torch.bfloat16])
    return Stats(
        n=c.numel(),
        diff=float(d.dot(d)),
        reference=float(r.dot(r)),
        candidate=float(c.dot(c)),
        extremes=(float(c.max()), float(c.min()), float(c.mean())),
        reference_extremes=(float(r.max()), float(r.min()), float(r.mean())),
        far=int((d.abs() > atol + rtol * r.abs()).sum()),
        nonfinite=bad,
    )


def of_saved(reference: TraceReader, candidate: TraceReader) -> Iterator[tuple[TraceKey, Stats]]:
    """Every floating-point tensor that both runs have in one shape, in the reference's order."""
    held: dict[TraceKey, list[Entry]] = {}
    for rank, entries in candidate.ranks.items():
        for number in range(len(entries)):
            entry = candidate.resolve(rank, number)
            held.setdefault(entry.key, []).append(entry)
    for key in reference:
        there = reference.entry(key)
        entries = [
            entry
            for entry in held.get(key, ())
            if not entry.misfit
            and not entry.sums
            and not entry.partial_over
            and entry.logical_shape == there.shape
        ]
        if entries and getattr(torch, there.dtype).is_floating_point:
            whole = reference.tensor(there)
            pieces = (SavedShard(candidate.tensor(e), e.boxes, e.factor) for e in entries)
            yield key, statistics(merged(pieces, whole), whole)


def merged(pieces: Iterable[SavedShard], whole: torch.Tensor) -> torch.Tensor:
    """The candidate's tensor, merged from its boxes; of replicas, the one that differs most."""
    found = torch.full(whole.shape, math.nan, dtype=torch.float64)
    worst: dict[object, float] = {}
    for piece in pieces:
        local = piece.local.double() / piece.factor
        for box in piece.boxes:
            part = local_view(local, box)
            distance = float((part - logical_view(whole, box).double()).norm())
            # NaN is worse than any number.
            distance = math.inf if math.isnan(distance) else distance
            if distance > worst.get(box.region, -1.0):
                worst[box.region] = distance
                logical_view(found, box).copy_(part)
    return found
