# SPDX-License-Identifier: Apache-2.0
"""What several ranks found out, in fewer records than one per rank and tensor.

On the way to the rank that judges, every rank of the tree merges what it receives. Two rules keep
messages as small as the model and its batch, however many ranks there are:

- Equal records of several ranks become one. Replicas whose tensors agree bit for bit have them.
- Parts that pass and together hold every element of a tensor equally often become one record of the
  whole tensor, with the sums of the worst part.

Neither changes a verdict. Tensors that fail on any rank, which all ranks know before, are not
joined, so that the replicas of a part can be compared with each other; nor is what an update
leaves, whose replicas must agree, unless ranks hold flat ranges (ZeRO, FSDP).
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured, fails
from megatron_ttrace.compare.tolerance import Tolerances, is_updated
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.coverage import Coverage, coverage
from megatron_ttrace.trace.records import Kind, TraceKey

type Covered = Callable[[tuple[int, ...], tuple[tuple[Box, ...], ...]], Coverage]
""":func:`coverage_of`, with a memory: most tensors of a model share a layout."""


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """A tensor, or a part of one, and the ranks that have it.

    Attributes:
        ranks: in rising order.
        copies: how many of them hold each of its elements: all of them for equal parts, fewer for
            parts that were joined.
        measured: what was found out about it.
    """

    ranks: tuple[int, ...]
    copies: int
    measured: Measured


def coverage_of(shape: tuple[int, ...], parts: tuple[tuple[Box, ...], ...]) -> Coverage:
    """Of a tensor by parts of it."""
    return coverage(shape, [box for boxes in parts for box in boxes])


def of_rank(rank: int, measured: Iterable[Measured]) -> list[Holding]:
    """What one rank measured, before anything is merged."""
    return [Holding((rank,), 1, tensor) for tensor in measured]


def of_ranks(measured: Mapping[int, Iterable[Measured]]) -> list[Holding]:
    """What each rank measured, before anything is merged."""
    return [held for rank, tensors in measured.items() for held in of_rank(rank, tensors)]


def by_rank(records: Iterable[Holding]) -> dict[int, list[Measured]]:
    """The records by rank; one that was joined belongs to each of its ranks as a whole."""
    measured: dict[int, list[Measured]] = {}
    for held in records:
        for rank in held.ranks:
            measured.setdefault(rank, []).append(held.measured)
    return dict(sorted(measured.items()))


def failing(measured: Iterable[Measured], tolerances: Tolerances) -> list[int]:
    """The tensors that fail on this rank, as numbers (:func:`number`), in rising order."""
    keys = {one.key for one in measured if one.problem or fails(one.sums, tolerances, one.key)}
    return sorted(map(number, keys))


def number(key: TraceKey) -> int:
    """63 bits that stand for a key: two keys with the same ones would both not be joined."""
    digest = hashlib.blake2b(repr(dataclasses.astuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def merge(
    held: Iterable[Holding],
    tolerances: Tolerances,
    failed: Collection[int] = (),
    parted: Collection[Kind] = (),
) -> list[Holding]:
    """The same in fewer records, in the order in which the tensors first appear.

    Not joined are tensors that ``failed`` on any rank (:func:`failing`), and those of the kinds
    ``parted``, of which it matters whether a rank holds a part.
    """
    alike: dict[TraceKey, dict[Measured, list[Holding]]] = {}
    for record in held:
        alike.setdefault(record.measured.key, {}).setdefault(record.measured, []).append(record)
    covered = functools.cache(coverage_of)
    merged = []
    for key, each in alike.items():
        once = [_once(measured, same) for measured, same in each.items()]
        apart = len(once) == 1 or key.kind in parted or number(key) in failed
        apart = apart or (is_updated(key) and not _are_flat(once))
        whole = None if apart else _joined(key, once, tolerances, covered)
        merged += once if whole is None else [whole]
    return merged


def _are_flat(parts: Sequence[Holding]) -> bool:
    return all(box.is_flat for part in parts for box in part.measured.boxes)


def _once(measured: Measured, same: Sequence[Holding]) -> Holding:
    ranks = tuple(sorted(rank for held in same for rank in held.ranks))
    return Holding(ranks, sum(held.copies for held in same), measured)


def _joined(
    key: TraceKey, parts: Sequence[Holding], tolerances: Tolerances, covered: Covered
) -> Holding | None:
    """One record of the whole tensor, if the parts are exactly one."""
    first = min(parts, key=lambda part: part.ranks).measured
    if not all(_joinable(part, first, parts[0].copies) for part in parts):
        return None
    shape, regions = first.logical_shape, tuple(part.measured.boxes for part in parts)
    if sum(box.numel for boxes in regions for box in boxes) != math.prod(shape):
        return None
    if covered(shape, regions) != Coverage(1, 1):
        return None
    tolerance = tolerances.of(key)
    worst = max((part.measured.sums or Sums() for part in parts), key=tolerance.error_of)
    start = (0,) * len(shape)
    return Holding(
        tuple(sorted(rank for part in parts for rank in part.ranks)),
        parts[0].copies,
        dataclasses.replace(
            first,
            boxes=(Box(start, shape, start),),
            sums=dataclasses.replace(worst, checksum=_checksum(parts)),
        ),
    )


def _joinable(part: Holding, first: Measured, copies: int) -> bool:
    one, sums = part.measured, part.measured.sums
    return (
        sums is not None
        and not (one.problem or one.sketch or one.moments or sums.undefined)
        and part.copies == copies
        and (one.note, one.logical_shape) == (first.note, first.logical_shape)
    )


def _checksum(parts: Sequence[Holding]) -> int:
    """Of the whole tensor, from those of its parts, whatever their order."""
    each = sorted(
        (part.measured.region, part.measured.sums and part.measured.sums.checksum) for part in parts
    )
    digest = hashlib.blake2b(repr(each).encode(), digest_size=8)
    return int.from_bytes(digest.digest())
