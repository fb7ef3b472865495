# SPDX-License-Identifier: Apache-2.0
"""Which elements of which parameters a rank put into a norm, a count, a reduction or an update.

A statistic is a sum over elements that ranks add up in collectives. A rank records what it added
itself (:class:`Part`) and the collectives that this went through (:class:`Sum`), so that the rank
that judges can say how often each logical element is in any rank's result.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum, StrEnum
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


class HyperparametersIndex(IntEnum):
    """Index of ``hyperparameters``."""

    STEP = 0
    """Those of the step."""
    NEXT = 1
    """What the schedule has set for the next step."""


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
class Hyperparameters:
    """A parameter group of an optimizer: its ``parts``, and its hyper-parameters by name.

    ``following``: what the schedule has set for the next step.
    """

    parts: Terms
    values: tuple[tuple[str, Annotated[float, Bounds(nan=True)]], ...]
    following: tuple[tuple[str, Annotated[float, Bounds(nan=True)]], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """Everything that a rank counted in one traced step; ``held``: its trainable parameters."""

    iteration: Count
    parts: tuple[Annotated[Part, LISTED], ...]
    held: tuple[Count, ...]
    countings: tuple[Annotated[Counting, LISTED], ...]
    stepped: tuple[Annotated[Hyperparameters, LISTED], ...] = ()


def encode(counted: Iterable[Counted]) -> list[Any]:
    """The records of one rank, ready for ``json.dumps``."""
    return [codec.encode(dataclasses.astuple(record)) for record in counted]


def decode(message: Any) -> tuple[Counted, ...]:
    """The inverse of :func:`encode`. Raises ``CodecError`` on a foreign message."""
    counted: tuple[Counted, ...] = codec.decode(tuple[Annotated[Counted, LISTED], ...], message)
    for record in counted:
        _require_numbers(record)
    return counted


def _require_numbers(counted: Counted) -> None:
    """Refuse numbers of parts and sums that are not there. Raises ``CodecError``."""
    parts = len(counted.parts)
    if any(number >= parts for number in counted.held):
        raise CodecError(f"held: there are {parts} parts")
    for group in counted.stepped:
        if any(term.number >= parts for term in group.parts):
            raise CodecError(f"stepped: there are {parts} parts")
    for counting in counted.countings:
        added = [(made.parts, made.sums) for made in counting.made]
        for earlier, (added_parts, sums) in enumerate((*added, (counting.parts, counting.sums))):
            if any(number >= parts for number, _ in added_parts):
                raise CodecError(f"countings: there are {parts} parts")
            if any(number >= earlier for number, _ in sums):
                raise CodecError(f"countings: a sum has {earlier} before it")


_Spans = tuple[tuple[Count, Count, Count], ...]
"""Terms as (first number, last number, times)."""
_Name = tuple[str, tuple[Count, ...]]
"""Name and shape of a part."""
_SPANS = codec.decoder(_Spans)
_SUMS = codec.decoder(tuple[tuple[Runs, Count, _Spans, _Spans], ...])
_PARTS = codec.decoder(tuple[tuple[_Name, tuple[Count, ...]], ...])
_NUMBERS = codec.decoder(tuple[int, ...])
_HYPERPARAMETERS = codec.decoder(tuple[tuple[str, Annotated[float, Bounds(nan=True)]], ...])
_VALUES = codec.decoder(tuple[Statistic, Annotated[float, Bounds(nan=True)], str])

Once = Callable[[Callable[[Any], Any], Any], Any]
"""Calls a function with a value, unless it knows the result (:class:`folded.Once`)."""


def compact(counted: Counted) -> list[Any]:
    """A record as JSON in which ranks of the same structure have equal parts (``folded.py``).

    A rank's part of a reduction is a piece of a parameter with the rank's own number as the first
    dim; here the number is apart from the pieces, which all replicas have.
    """
    reduced = {
        term.number
        for counting in counted.countings
        if counting.statistic is Statistic.REDUCED
        for terms in (counting.parts, *(made.parts for made in counting.made))
        for term in terms
    }
    held = set(counted.held)
    pieces: list[tuple[tuple[int, int, bool], list[Any]]] = []
    for number, part in enumerate(counted.parts):
        rank, ranks, part = _apart(part) if number in reduced else (-1, 0, part)
        sort = rank, ranks, number in held
        if not pieces or pieces[-1][0] != sort:
            pieces.append((sort, []))
        pieces[-1][1].append([[part.name, [*part.shape]], _flat(part.boxes)])
    return [
        counted.iteration,
        [[rank, ranks, parts] for (rank, ranks, _), parts in pieces],
        _spans(Term(number) for number in counted.held),
        [
            [
                counting.statistic.value,
                [[m.group, m.order, _spans(m.parts), _spans(m.sums)] for m in counting.made],
                _spans(counting.parts),
                _spans(counting.sums),
                codec.encode(counting.value),
                counting.unknown,
            ]
            for counting in counted.countings
        ],
        [
            [_spans(group.parts), *codec.encode((group.values, group.following))]
            for group in counted.stepped
        ],
    ]


def expanded(message: Any, once: Once) -> Counted:
    """The inverse of :func:`compact`. Raises ``CodecError`` on a foreign message.

    ``once`` reads a part of it, or knows it from another message.
    """
    iteration, pieces, held, countings, stepped = _fields(message, 5)
    parts: list[Part] = []
    for piece in _fields(pieces):
        rank, ranks, listed = _fields(piece, 3)
        rank, ranks = _NUMBERS((rank, ranks))
        known = once(_parts, listed)
        parts += known if rank < 0 else (_with(part, rank, ranks) for part in known)
    counted = Counted(
        _NUMBERS((iteration,))[0],
        tuple(parts),
        tuple(term.number for term in _terms(once(_SPANS, held), len(parts))),
        tuple(_counting(fields, len(parts), once) for fields in _fields(countings)),
        tuple(_hyperparameters(fields, len(parts), once) for fields in _fields(stepped)),
    )
    _require_numbers(counted)
    return counted


def _fields(value: Any, count: int | None = None) -> Sequence[Any]:
    """A list, of which the parts are read later."""
    if not isinstance(value, (list, tuple)) or count not in (None, len(value)):
        raise CodecError(f"expected a list of {count or 'records'}")
    return value


def _parts(listed: Any) -> tuple[Part, ...]:
    return tuple(
        Part(name, shape, tuple(_unflat(boxes))) for (name, shape), boxes in _PARTS(listed)
    )


def _counting(message: Any, known: int, once: Once) -> Counting:
    statistic, made, parts, sums, value, unknown = _fields(message, 6)
    statistic, value, unknown = _VALUES((statistic, value, unknown))
    collectives = once(_SUMS, made)
    return Counting(
        statistic=statistic,
        made=tuple(
            Sum(group, order, _terms(added, known), _terms(earlier, len(collectives)))
            for group, order, added, earlier in collectives
        ),
        parts=_terms(once(_SPANS, parts), known),
        sums=_terms(once(_SPANS, sums), len(collectives)),
        value=value,
        unknown=unknown,
    )


def _hyperparameters(message: Any, known: int, once: Once) -> Hyperparameters:
    parts, *numbers = _fields(message, 3)
    values, following = (once(_HYPERPARAMETERS, each) for each in numbers)
    return Hyperparameters(_terms(once(_SPANS, parts), known), values, following)


def _spans(terms: Iterable[Term]) -> list[list[int]]:
    spans: list[list[int]] = []
    for number, times in terms:
        if spans and (spans[-1][1], spans[-1][2]) == (number - 1, times):
            spans[-1][1] = number
        else:
            spans.append([number, number, times])
    return spans


def _terms(spans: _Spans, known: int) -> Terms:
    if any(last >= known for _, last, _ in spans):
        raise CodecError(f"a number of one of {known}")
    return tuple(Term(n, times) for first, last, times in spans for n in range(first, last + 1))


def _flat(boxes: Iterable[Box]) -> list[int]:
    """Boxes as numbers: how many each side has, then these."""
    sides = ((box.logical, box.extent, box.local) for box in boxes)
    return [n for each in sides for n in (*map(len, each), *itertools.chain(*each))]


def _unflat(numbers: tuple[int, ...]) -> Iterator[Box]:
    """The inverse of :func:`_flat`. Raises ``CodecError``."""
    at = 0
    while at < len(numbers):
        sizes = numbers[at : at + 3]
        if len(sizes) < 3 or at + 3 + sum(sizes) > len(numbers):
            raise CodecError("expected boxes")
        a, b, c, at = itertools.accumulate(sizes, initial=at + 3)
        yield Box(numbers[a:b], numbers[b:c], numbers[c:at])


def _apart(part: Part) -> tuple[int, int, Part]:
    """Where a part is on its first dim, that dim's size, and the part without the dim.

    -1, 0 and the part itself if it is not at one place.
    """
    starts = {(box.logical[:1], box.extent[:1], box.local[:1]) for box in part.boxes}
    if len(starts) != 1 or not (start := starts.pop())[0] or start[1:] != ((1,), (0,)):
        return -1, 0, part
    boxes = (Box(box.logical[1:], box.extent[1:], box.local[1:]) for box in part.boxes)
    return start[0][0], part.shape[0], Part(part.name, part.shape[1:], tuple(boxes))


def _with(part: Part, rank: int, ranks: int) -> Part:
    boxes = (Box((rank, *b.logical), (1, *b.extent), (0, *b.local)) for b in part.boxes)
    return Part(part.name, (ranks, *part.shape), tuple(boxes))


def runs_of(ranks: Iterable[int]) -> Runs:
    """Ranks as arithmetic progressions, in rising order."""
    rest, runs = sorted(set(ranks)), []
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        size = 1
        while size < len(rest) and rest[size] == rest[0] + size * step:
            size += 1
        runs.append((rest[0], rest[size - 1], step))
        rest = rest[size:]
    return tuple(runs)


def ranks_of(runs: Runs) -> Iterator[int]:
    """The inverse of :func:`runs_of`."""
    for first, last, step in runs:
        yield from range(first, last + 1, max(step, 1))
