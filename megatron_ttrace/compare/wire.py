# SPDX-License-Identifier: Apache-2.0
"""The findings of ranks as JSON: a few numbers per tensor, repeated parts only once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

from megatron_ttrace.compare.gathered import Held
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured, Problem
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import LISTED, CodecError, Count
from megatron_ttrace.trace.counted import Runs, ranks_of, runs_of
from megatron_ttrace.trace.findings import Note
from megatron_ttrace.trace.moments import Moments
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
    """A finding; ``part`` and ``ranks`` are numbers in the lists of parts and of ranks."""

    key: Annotated[TraceKey, LISTED]
    part: Count
    sums: Annotated[Sums, LISTED] | None
    problem: Problem | None
    note: Note | None
    sketch: tuple[float, ...]
    moments: Annotated[Moments, LISTED] | None
    ranks: Count
    copies: Count


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    parts: tuple[Annotated[_Part, LISTED], ...]
    ranks: tuple[Runs, ...]
    rows: tuple[Annotated[_Row, LISTED], ...]


def encode(held: Iterable[Held]) -> dict[str, Any]:
    """The findings of some ranks, ready for ``json.dumps``."""
    parts: dict[_Part, int] = {}
    ranks: dict[tuple[int, ...], int] = {}
    rows = []
    for each in held:
        one = each.found
        part = _Part(one.placement, one.boxes, one.logical_shape, one.partial_over)
        number = parts.setdefault(part, len(parts))
        key, sums, moments = (
            None if found is None else codec.listed(found)
            for found in (one.key, one.sums, one.moments)
        )
        at = ranks.setdefault(each.ranks, len(ranks))
        more = codec.encode((one.problem, one.note, one.sketch))
        rows.append([key, number, sums, *more, moments, at, each.copies])
    return {
        "parts": codec.encode([dataclasses.astuple(part) for part in parts]),
        "ranks": codec.encode([runs_of(one) for one in ranks]),
        "rows": rows,
    }


def decode(message: Any) -> list[Held]:
    """The inverse of :func:`encode`. Raises ``CodecError`` on a foreign message."""
    said = codec.decode(_Message, message)
    ranks = [tuple(ranks_of(runs)) for runs in said.ranks]
    found = []
    for row in said.rows:
        if row.part >= len(said.parts):
            raise CodecError(f"part {row.part} of {len(said.parts)}")
        if row.ranks >= len(ranks):
            raise CodecError(f"ranks {row.ranks} of {len(ranks)}")
        part = said.parts[row.part]
        measured = Measured(
            key=row.key,
            placement=part.placement,
            boxes=part.boxes,
            logical_shape=part.logical_shape,
            sums=row.sums,
            problem=row.problem,
            note=row.note,
            sketch=row.sketch,
            moments=row.moments,
            partial_over=part.partial_over,
        )
        found.append(Held(ranks[row.ranks], row.copies, measured))
    return found
