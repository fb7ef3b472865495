# SPDX-License-Identifier: Apache-2.0
"""A rank's findings as JSON: a few numbers per tensor, repeated parts only once."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured, Problem
from megatron_ttrace.compare.moments import Moments
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import LISTED, CodecError, Count
from megatron_ttrace.trace.findings import Note
from megatron_ttrace.trace.records import TraceKey


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What many tensors of a rank have in common."""

    placement: str
    boxes: tuple[Annotated[Box, LISTED], ...]
    logical_shape: tuple[Count, ...]
    partial_over: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A finding; ``part`` is a number in the list of parts."""

    key: Annotated[TraceKey, LISTED]
    part: Count
    sums: Annotated[Sums, LISTED] | None
    problem: Problem | None
    note: Note | None
    sketch: tuple[float, ...]
    moments: Annotated[Moments, LISTED] | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    parts: tuple[Annotated[_Part, LISTED], ...]
    rows: tuple[Annotated[_Row, LISTED], ...]


def encode(measured: list[Measured]) -> dict[str, Any]:
    """The findings of one rank, ready for ``json.dumps``."""
    parts: dict[_Part, int] = {}
    rows = []
    for one in measured:
        part = _Part(one.placement, one.boxes, one.logical_shape, one.partial_over)
        number = parts.setdefault(part, len(parts))
        key, sums, moments = (
            None if found is None else dataclasses.astuple(found)
            for found in (one.key, one.sums, one.moments)
        )
        rows.append((key, number, sums, one.problem, one.note, one.sketch, moments))
    message = {"parts": [dataclasses.astuple(part) for part in parts], "rows": rows}
    return codec.encode(message)  # type: ignore[no-any-return]


def decode(message: Any) -> list[Measured]:
    """The inverse of :func:`encode`. Raises ``CodecError`` on a foreign message."""
    said = codec.decode(_Message, message)
    found = []
    for row in said.rows:
        if row.part >= len(said.parts):
            raise CodecError(f"part {row.part} of {len(said.parts)}")
        part = said.parts[row.part]
        found.append(
            Measured(
                row.key,
                part.placement,
                part.boxes,
                part.logical_shape,
                row.sums,
                row.problem,
                row.note,
                row.sketch,
                row.moments,
                part.partial_over,
            )
        )
    return found
