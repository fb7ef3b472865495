# SPDX-License-Identifier: Apache-2.0
"""A rank's findings as JSON: a few numbers per tensor, repeated parts only once."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.moments import Moments
from megatron_ttrace.compare.sinks import Measured
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.records import Kind, TraceKey


def encode(measured: list[Measured]) -> dict[str, Any]:
    """The findings of one rank, ready for ``json.dumps``."""
    layouts: dict[Any, int] = {}
    rows = []
    for one in measured:
        layout = (one.placement, one.boxes, one.logical_shape)
        number = layouts.setdefault(layout, len(layouts))
        sums, moments = (
            None if found is None else [_text(v) for v in dataclasses.astuple(found)]
            for found in (one.sums, one.moments)
        )
        key = [one.key.iteration, one.key.microbatch, one.key.kind.value, one.key.name]
        said = one.problem, one.note, one.sketch
        rows.append([*key, one.key.index, number, sums, *said, moments])
    return {
        "layouts": [
            [placement, [[b.logical, b.extent, b.local] for b in boxes], shape]
            for placement, boxes, shape in layouts
        ],
        "rows": rows,
    }


def decode(message: dict[str, Any]) -> list[Measured]:
    """The inverse of :func:`encode`."""
    layouts = [
        (
            placement,
            tuple(Box(tuple(g), tuple(e), tuple(o)) for g, e, o in boxes),
            tuple(shape),
        )
        for placement, boxes, shape in message["layouts"]
    ]
    found = []
    for row in message["rows"]:
        iteration, microbatch, kind, name, index, number, sums, problem, note, sketch, moments = row
        placement, boxes, shape = layouts[number]
        found.append(
            Measured(
                key=TraceKey(iteration, microbatch, Kind(kind), name, index),
                placement=placement,
                boxes=boxes,
                logical_shape=shape,
                sums=None if sums is None else Sums.of(sums),
                problem=problem,
                note=note,
                sketch=tuple(sketch),
                moments=None if moments is None else Moments.of(moments),
            )
        )
    return found


def _text(value: float | int) -> float | int | str:
    """Infinities and NaN have no JSON number."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
