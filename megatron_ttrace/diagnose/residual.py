# SPDX-License-Identifier: Apache-2.0
"""What the error of a failed tensor looks like, element by element, for the report's details."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import Culprit, Element, Residual, TraceKey

LOWEST, HIGHEST = -9, 2
"""Decades of the histogram; values beyond count in the first or the last one."""

MOST = 60
"""Tensors that are looked at: the worst of each name and kind, the worst of all first."""

WORST = 6
_RANKS, _BOXES = 8, 4
ELEMENTS = 1 << 26
"""After so many elements no further tensor is looked at. The same on every machine, unlike time."""


def residuals(
    verdicts: Iterable[Judged],
    culprits: Sequence[Culprit],
    evidence: Callable[[TraceKey], Evidence | None],
) -> tuple[Residual, ...]:
    """The residuals of failed tensors whose shards were kept, culprits' first. Never raises."""
    shown: list[Residual] = []
    for key in _chosen(verdicts, culprits):
        if sum(other.total for other in shown) >= ELEMENTS:
            break
        # Details are optional, the verdicts are complete.
        with contextlib.suppress(Exception):
            if (failed := evidence(key)) is not None:
                shown.append(residual(failed))
    return tuple(shown)


def _chosen(verdicts: Iterable[Judged], culprits: Sequence[Culprit]) -> list[TraceKey]:
    failed = [v for v in verdicts if v.verdict.is_failure and v.margin is not None]
    worst: dict[object, Judged] = {}
    for verdict in failed:
        sort = (verdict.name, verdict.kind)
        if sort not in worst or (verdict.margin or 0.0) > (worst[sort].margin or 0.0):
            worst[sort] = verdict
    # A culprit is of one microbatch, which need not be the worst.
    shown = filter(None, (culprit.shown_by(failed) for culprit in culprits))
    ordered = sorted(worst.values(), key=lambda verdict: -(verdict.margin or 0.0))
    return list(dict.fromkeys(verdict.key for verdict in [*shown, *ordered]))[:MOST]


def residual(evidence: Evidence) -> Residual:
    """Histogram and worst elements of ``|c - r| / rms(r)`` over all failing parts."""
    scale = evidence.tolerance.rms or 1.0
    counts = [0] * (HIGHEST - LOWEST + 1)
    exact = total = 0
    worst: dict[tuple[int, ...], float] = {}
    for part in evidence.parts:
        for piece, right, box in zip(part.pieces, evidence.expected(part), part.boxes, strict=True):
            error = ((piece - right).abs() / scale).reshape(-1)
            # NaN counts as the largest error.
            error = torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)
            total += error.numel()
            exact += int((error == 0).sum())
            decades = error[error > 0].log10().floor().clamp(LOWEST, HIGHEST).long() - LOWEST
            for at, number in enumerate(torch.bincount(decades, minlength=len(counts)).tolist()):
                counts[at] += number
            for index, size in _worst(error, piece.shape, box):
                worst[index] = max(size, worst.get(index, 0.0))
            worst = dict(sorted(worst.items(), key=lambda element: -element[1])[:WORST])
    return Residual(
        **dataclasses.asdict(evidence.key),
        total=total,
        exact=exact,
        lowest=LOWEST,
        counts=tuple(counts),
        worst=_side_by_side(evidence, worst),
        boxes=tuple((part.rank, _spans(part.boxes)) for part in evidence.parts[:_RANKS]),
    )


def _side_by_side(evidence: Evidence, indices: Iterable[tuple[int, ...]]) -> tuple[Element, ...]:
    """Elements with the values of all failing ranks that hold them, in the order of ``indices``."""
    elements: dict[tuple[int, ...], list[Element]] = {index: [] for index in indices}
    for part in evidence.parts[:_RANKS]:
        for piece, right, box in zip(part.pieces, evidence.expected(part), part.boxes, strict=True):
            for index, by_rank in elements.items():
                inside = tuple(i - s for i, s in zip(index, box.logical, strict=True))
                if all(0 <= i < size for i, size in zip(inside, box.extent, strict=True)):
                    element = Element(index, float(right[inside]), float(piece[inside]), part.rank)
                    by_rank.append(element)
    return tuple(itertools.chain(*elements.values()))


def _worst(
    error: torch.Tensor, shape: torch.Size, box: Box
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Logical index and error of the worst elements of a part."""
    if not error.numel():
        return
    top = torch.topk(error, min(WORST, error.numel()))
    for size, flat in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        inside = torch.unravel_index(torch.tensor(flat), shape)
        yield tuple(s + int(i) for s, i in zip(box.logical, inside, strict=True)), size


def _spans(boxes: tuple[Box, ...]) -> str:
    """Logical slices as one would write them in Python: ``[0:8, 0:64] [16:24, 0:64]``."""
    more = f" and {len(boxes) - _BOXES} more" if len(boxes) > _BOXES else ""
    return " ".join(map(str, boxes[:_BOXES])) + more
