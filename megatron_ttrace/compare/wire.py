# SPDX-License-Identifier: Apache-2.0
"""A rank's findings as JSON: a few numbers per tensor, repeated parts only once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.moments import Moments
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import Bounds, CodecError, Count, Word
from megatron_ttrace.trace.records import Kind, Microbatch, TraceKey

_Total = Annotated[float, Bounds(0.0, nan=True)]
_SUMS = tuple[Count, _Total, _Total, _Total, float, _Total, Count, Word, Count]
_MOMENTS = tuple[Count, float, _Total, float, _Total, float, float, Count, Word]
_Shape = tuple[Count, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    """``rows`` name their layout (placement, boxes, shape, axis of partial ones) by number."""

    layouts: tuple[tuple[str, tuple[tuple[_Shape, _Shape, _Shape], ...], _Shape, str], ...]
    rows: tuple[
        tuple[
            Count,
            Microbatch,
            Kind,
            str,
            Count,
            Count,
            _SUMS | None,
            str,
            str,
            tuple[float, ...],
            _MOMENTS | None,
        ],
        ...,
    ]


def sums_of(values: Sequence[Any]) -> Sums:
    """Sums that were written as a list. Raises ``CodecError``."""
    return Sums(*codec.decoder(_SUMS)(values))


def moments_of(values: Sequence[Any]) -> Moments:
    """Moments that were written as a list. Raises ``CodecError``."""
    return Moments(*codec.decoder(_MOMENTS)(values))


def encode(measured: list[Measured]) -> dict[str, Any]:
    """The findings of one rank, ready for ``json.dumps``."""
    layouts: dict[Any, int] = {}
    rows = []
    for one in measured:
        number = layouts.setdefault(
            (one.placement, one.boxes, one.logical_shape, one.partial_over), len(layouts)
        )
        sums, moments = (
            None if found is None else dataclasses.astuple(found)
            for found in (one.sums, one.moments)
        )
        key = dataclasses.astuple(one.key)
        rows.append((*key, number, sums, one.problem, one.note, one.sketch, moments))
    found: dict[str, Any] = codec.encode(
        {
            "layouts": [
                (placement, [(box.logical, box.extent, box.local) for box in boxes], *rest)
                for placement, boxes, *rest in layouts
            ],
            "rows": rows,
        }
    )
    return found


def decode(message: Any) -> list[Measured]:
    """The inverse of :func:`encode`. Raises ``CodecError`` on a foreign message."""
    said = codec.decode(_Message, message)
    layouts = [
        (placement, tuple(Box(*box) for box in boxes), shape, axis)
        for placement, boxes, shape, axis in said.layouts
    ]
    found = []
    for row in said.rows:
        key, (number, sums, problem, note, sketch, moments) = TraceKey(*row[:5]), row[5:]
        if number >= len(layouts):
            raise CodecError(f"layout {number} of {len(layouts)}")
        placement, boxes, shape, axis = layouts[number]
        found.append(
            Measured(
                key=key,
                placement=placement,
                boxes=boxes,
                logical_shape=shape,
                sums=None if sums is None else Sums(*sums),
                problem=problem,
                note=note,
                sketch=sketch,
                moments=None if moments is None else Moments(*moments),
                partial_over=axis,
            )
        )
    return found
