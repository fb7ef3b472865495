# SPDX-License-Identifier: Apache-2.0
"""Which elements of which parameters a rank put into a norm, a count, a reduction or an update.

A statistic is a sum over elements that ranks add up in collectives. A rank records what it added
itself (:class:`Part`) and the collectives that this went through (:class:`Sum`), so that the rank
that judges can say how often each logical element is in any rank's result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import LISTED, Bounds, CodecError, Count, Rank


class Statistic(StrEnum):
    """What takes elements of parameters or of their gradients."""

    GRAD_NORM = "grad_norm"
    NUM_ZEROS = "num_zeros"
    PARAMS_NORM = "params_norm"
    CLIPPED = "clipped"
    STEPPED = "stepped"
    REDUCED = "reduced"
    """By buckets of gradients: a :class:`Part` has the ranks that add them up as its first dim."""

    @property
    def number(self) -> int:
        """The index of its verdicts."""
        return [*Statistic].index(self)

    @property
    def is_local(self) -> bool:
        """Whether a rank needs its own elements only, not those of the whole model."""
        return self in (Statistic.CLIPPED, Statistic.STEPPED, Statistic.REDUCED)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A piece of a parameter: its logical elements."""

    name: str
    shape: tuple[Count, ...]
    boxes: tuple[Annotated[Box, LISTED], ...]


class Term(NamedTuple):
    """A summand: a number in a list of parts or sums, and how often it is added."""

    number: Count
    times: Count = 1


Terms = tuple[Term, ...]

Runs = tuple[tuple[Rank, Rank, Rank], ...]
"""Ranks as (first, last, distance): the world of any size is one run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """A collective that adds up what the ranks of a group have.

    Attributes:
        group: its ranks.
        order: its number among this rank's collectives of the statistic over this group.
        parts: of this rank, that went in.
        sums: earlier results that went in.
    """

    group: Runs
    order: Count
    parts: Terms = ()
    sums: Terms = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Counting:
    """One computation of a statistic on one rank.

    Attributes:
        statistic: what was computed.
        made: the collectives in it.
        parts: in the result without any collective.
        sums: of ``made`` that are in the result.
        value: the norm that gradients were clipped by; 0 for other statistics.
        unknown: what went in and is not known to be of any parameter; empty if all is known.
    """

    statistic: Statistic
    made: tuple[Annotated[Sum, LISTED], ...] = ()
    parts: Terms = ()
    sums: Terms = ()
    value: Annotated[float, Bounds(nan=True)] = 0.0
    unknown: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """Everything that a rank counted in one traced step; ``held``: its trainable parameters."""

    iteration: Count
    parts: tuple[Annotated[Part, LISTED], ...]
    held: tuple[Count, ...]
    countings: tuple[Annotated[Counting, LISTED], ...]


def encode(counted: Iterable[Counted]) -> list[Any]:
    """The records of one rank, ready for ``json.dumps``."""
    return [codec.encode(dataclasses.astuple(one)) for one in counted]


def decode(message: Any) -> tuple[Counted, ...]:
    """The inverse of :func:`encode`. Raises ``CodecError`` on a foreign message."""
    found: tuple[Counted, ...] = codec.decode(tuple[Annotated[Counted, LISTED], ...], message)
    for one in found:
        parts = len(one.parts)
        if any(number >= parts for number in one.held):
            raise CodecError(f"held: there are {parts} parts")
        for counting in one.countings:
            added = [(made.parts, made.sums) for made in counting.made]
            for earlier, (own, sums) in enumerate((*added, (counting.parts, counting.sums))):
                if any(number >= parts for number, _ in own):
                    raise CodecError(f"countings: there are {parts} parts")
                if any(number >= earlier for number, _ in sums):
                    raise CodecError(f"countings: a sum has {earlier} before it")
    return found


def runs_of(ranks: Iterable[int]) -> Runs:
    """Ranks as arithmetic progressions, in rising order."""
    left, found = sorted(set(ranks)), []
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        size = 1
        while size < len(left) and left[size] == left[0] + size * step:
            size += 1
        found.append((left[0], left[size - 1], step))
        left = left[size:]
    return tuple(found)


def ranks_of(runs: Runs) -> Iterator[int]:
    """The inverse of :func:`runs_of`."""
    for first, last, step in runs:
        yield from range(first, last + 1, max(step, 1))
