# SPDX-License-Identifier: Apache-2.0
"""What the perturbed replays did to each tensor of a reference, and the file that keeps it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Self

from megatron_ttrace.compare.measure import Sums, relative_error
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import LISTED, Bounds, Count
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.store import TraceReader, atomic_write

FILE = "tolerances.jsonl"

_Written = Annotated[float, Bounds(0.0, nan=True, text=True)]
"""A number that is written as Python writes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """What the perturbed replays did to one tensor.

    ``n`` elements, ``norm`` of the reference, ``moved`` the relative distance for each seed
    (``inf`` where the reference is zero and the replay is not). ``repeated`` is the distance of a
    replay that was not perturbed: zero unless the model is not deterministic. ``peak`` is the
    largest distance of one element, ``row`` that of one row of a moment, ``top`` the largest
    element (1: any), relative to the norm.
    """

    n: Count
    norm: _Written
    moved: tuple[_Written, ...]
    repeated: _Written = 0.0
    peak: _Written = 0.0
    top: _Written = 1.0
    row: _Written = 0.0

    def contradiction(self) -> str:
        """Why no replays can have done this; empty if they can."""
        if not self.moved:
            return "moved: no replay"
        return "norm: no element, but a norm" if self.norm and not self.n else ""

    @classmethod
    def after(cls, before: Self | None, sums: Sums | None, row: float = 0.0) -> Self:
        """With one more replay.

        Args:
            before: what the replays until this one did; ``None`` if this is the first.
            sums: of this one's tensor; ``None`` if its shape is another, because the replay routes
                another number of tokens to an expert: the tensor is then blind.
            row: distance of the row that it moved farthest; 0 if that was not measured.
        """
        sums = sums or Sums(diff=math.inf)
        distance = math.inf if math.isinf(sums.diff) else relative_error(sums, rms=0.0)
        norm = math.sqrt(sums.reference)
        peak, row = (sums.worst / norm, row / norm) if norm else (0.0, 0.0)
        if before is None:
            return cls(sums.n, norm, (distance,), peak=peak, row=row)
        moved, peak, row = (*before.moved, distance), max(before.peak, peak), max(before.row, row)
        return dataclasses.replace(before, moved=moved, peak=peak, row=row)


@dataclasses.dataclass(frozen=True, slots=True)
class _Line:
    """What a line of ``tolerances.jsonl`` has beside the fields of :class:`Moved`."""

    key: Annotated[TraceKey, LISTED]


def write_moves(directory: Path, moved: dict[TraceKey, Moved]) -> None:
    """Write ``tolerances.jsonl`` of a reference."""
    lines = (
        {
            "key": dataclasses.astuple(key),
            "n": value.n,
            "norm": repr(value.norm),
            "moved": [repr(m) for m in value.moved],
            **{
                field.name: repr(number)
                for field in dataclasses.fields(value)[3:]
                if (number := getattr(value, field.name)) != field.default
            },
        }
        for key, value in moved.items()
    )
    atomic_write(directory / FILE, "".join(f"{json.dumps(line)}\n" for line in lines))


def read_moves(directory: Path, known: Container[TraceKey]) -> dict[TraceKey, Moved]:
    """What replays did to each tensor of a reference, which has the ``known`` ones.

    Raises:
        TTraceError: when ``tolerances.jsonl`` is absent or damaged, or is of another trace.
    """
    path = directory / FILE
    moved: dict[TraceKey, Moved] = {}
    try:
        for value in codec.lines(path):
            key, what = codec.decode(_Line, value).key, codec.decode(Moved, value)
            if key in moved:
                raise codec.CodecError("the same tensor a second time")
            if key not in known:
                raise codec.CodecError("no such tensor in the trace")
            moved[key] = what
    except FileNotFoundError:
        raise TTraceError(
            f"{path} is missing, {directory} is not a reference trace: give one made by --ttrace"
        ) from None
    except (OSError, codec.CodecError) as error:
        raise TTraceError(
            f"{path}:{len(moved) + 1} is damaged ({error}): make the reference again"
        ) from error
    return moved


def moves_of(reference: TraceReader) -> dict[TraceKey, Moved]:
    """What replays did to each tensor of a verified reference. Raises as `read_moves` does."""
    if (reference.directory / FILE).exists():  # else `read_moves` says what is wrong
        reference.verify(FILE)
    return read_moves(reference.directory, frozenset(reference))
