# SPDX-License-Identifier: Apache-2.0
"""The findings of ranks as JSON: a few numbers per tensor, repeated parts only once."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

from megatron_ttrace.compare.gathered import Holding
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


_SHARED = tuple(field.name for field in dataclasses.fields(_Part))
_OWN = ("key", "sums", "problem", "note", "sketch", "moments")


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    parts: tuple[Annotated[_Part, LISTED], ...]
    ranks: tuple[Runs, ...]
    rows: tuple[Annotated[_Row, LISTED], ...]


def encode(records: Iterable[Holding]) -> dict[str, Any]:
    """The findings of some ranks, ready for ``json.dumps``."""
    parts: dict[_Part, int] = {}
    ranks: dict[tuple[int, ...], int] = {}
    rows = []
    for record in records:
        tensor = record.measured
        part = _Part(*(getattr(tensor, name) for name in _SHARED))
        number = parts.setdefault(part, len(parts))
        key, sums, moments = (
            None if value is None else codec.listed(value)
            for value in (tensor.key, tensor.sums, tensor.moments)
        )
        at = ranks.setdefault(record.ranks, len(ranks))
        more = codec.encode((tensor.problem, tensor.note, tensor.sketch))
        rows.append([key, number, sums, *more, moments, at, record.copies])
    return {
        "parts": codec.encode([dataclasses.astuple(part) for part in parts]),
        "ranks": codec.encode([runs_of(members) for members in ranks]),
        "rows": rows,
    }


def decode(message: Any) -> list[Holding]:
    """The inverse of :func:`encode`. Raises ``CodecError`` on a foreign message."""
    read = codec.decode(_Message, message)
    ranks = [tuple(ranks_of(runs)) for runs in read.ranks]
    records = []
    for row in read.rows:
        if row.part >= len(read.parts):
            raise CodecError(f"part {row.part} of {len(read.parts)}")
        if row.ranks >= len(ranks):
            raise CodecError(f"ranks {row.ranks} of {len(ranks)}")
        own = {name: getattr(row, name) for name in _OWN}
        shared = {name: getattr(read.parts[row.part], name) for name in _SHARED}
        records.append(Holding(ranks[row.ranks], row.copies, Measured(**own, **shared)))
    return records
