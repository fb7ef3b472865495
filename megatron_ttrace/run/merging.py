# SPDX-License-Identifier: Apache-2.0
"""The shards of a reference on several ranks become the trace that a single device would write.

One tensor is put together at a time, from mapped files, and written: no process holds more than one
whole tensor and the writer's buffers. Ranks that hold the same elements must have the same bits:
replicas that differ make the reference itself wrong.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.tolerance import Moved
from megatron_ttrace.saved.whole import Shards
from megatron_ttrace.trace.counted import Counted, Counting, Part, Term
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import MOMENTS, STEP_LEVEL, Direction, Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter

Movement = list[tuple[tuple[Any, ...], str, int, str, str, str]]
"""Of each part of a tensor: key, region, elements, and sums of squares of the difference and of the
reference, as Python writes numbers."""


def merge(directory: Path, stages: Sequence[int], writer: TraceWriter) -> None:
    """Write the logical tensors of all ranks' shards.

    Args:
        directory: of the shards.
        stages: the pipeline stage of each rank.
        writer: of the merged trace; it stays open.

    Raises:
        TTraceError: when ranks lack a part of a tensor, or disagree on one.
    """
    trace = TraceReader(directory, sealed=False)
    shards = Shards(trace)
    lines: dict[TraceKey, int] = {}
    for key in in_order(shards, stages):
        if key.kind is Kind.INITIAL:
            if (found := shards.moments(key)) is None:
                raise TTraceError(f"the reference's ranks lack a part of {key}")
            entry, moments = found
            sums = dataclasses.astuple(moments)
            writer.add(Entry(key, entry.logical_shape, entry.dtype, sums=sums), None)
            continue
        whole = shards.tensor(key)
        if whole is None:
            raise TTraceError(f"the reference's ranks lack a part of {key}")
        if ranks := shards.conflicting(key, whole):
            raise TTraceError(
                f"the reference's ranks {', '.join(map(str, ranks))} differ from other ranks in "
                f"{key}: the reference is wrong, or its step is not deterministic"
            )
        same = _first_name(trace, shards, key)
        line = None if same is None else lines.get(same)
        entry = Entry.of(key, whole)
        if line is None:
            lines[key] = writer.add(entry, whole)
        else:
            writer.add(dataclasses.replace(entry, same_as=line), None)


def _first_name(trace: TraceReader, shards: Shards, key: TraceKey) -> TraceKey | None:
    """The first name of the same tensor, if it has one on all ranks that hold it."""
    found = set()
    for rank, number in shards.holders(key):
        entry = trace.ranks[rank][number]
        if entry.same_as < 0:
            return None
        first = trace.ranks[rank][entry.same_as]
        if (first.boxes, first.logical_shape) != (entry.boxes, entry.logical_shape):
            return None
        found.add(first.key)
    return found.pop() if len(found) == 1 else None


def in_order(shards: Shards, stages: Sequence[int]) -> list[TraceKey]:
    """All keys in the order in which a single device would trace them.

    A pipeline's stages run different microbatches at a time. On one device a microbatch passes all
    stages forward, then backward, before the next one; parameters come stage by stage.
    """
    kinds: dict[tuple[Kind, int], int] = {}

    def place(key: TraceKey) -> tuple[int, ...]:
        # Ranks of a stage do the same, so that their lines of a module have the same numbers. The
        # rows of a microbatch are with other ranks than its other tensors.
        rank, line = min(shards.holders(key), key=lambda at: (stages[at[0]], at[1], at[0]))
        stage = stages[rank]
        if key.microbatch != STEP_LEVEL and key.kind is not Kind.TOKENS:
            backward = key.direction is Direction.BACKWARD
            if backward:
                rank, line = max(shards.holders(key), key=lambda one: (stages[one[0]], -one[0]))
                stage = -stages[rank]
            return key.iteration, 1, key.microbatch, int(backward), stage, line, rank
        begins = key.direction is Direction.START
        # The moments of a parameter come after its change.
        kind = Kind.PARAM_DELTA if key.kind in MOMENTS else key.kind
        group = kinds.setdefault((kind, key.index), len(kinds))
        return key.iteration, 0 if begins else 2, group, 0, stage, line, rank

    return sorted(shards, key=place)


def merged(counted: Mapping[int, Sequence[Counted]]) -> list[Counted]:
    """What all ranks of a reference counted, as one device that has all parameters would say it."""
    found: dict[int, Counted] = {}
    for each in counted.values():
        for one in each:
            before = found.get(one.iteration)
            found[one.iteration] = one if before is None else _both(before, one)
    return [_alone(one) for one in found.values()]


def _both(one: Counted, other: Counted) -> Counted:
    parts = list(one.parts)
    numbers: dict[Part, int] = {part: number for number, part in enumerate(parts)}
    renamed = []
    for part in other.parts:
        if part not in numbers:
            numbers[part] = len(parts)
            parts.append(part)
        renamed.append(numbers[part])
    theirs = tuple(
        dataclasses.replace(_flat(counting), parts=_renamed(_flat(counting).parts, renamed))
        for counting in other.countings
    )
    held = (*one.held, *(renamed[number] for number in other.held))
    mine = tuple(map(_flat, one.countings))
    stepped = tuple(
        dataclasses.replace(group, parts=_renamed(group.parts, renamed)) for group in other.stepped
    )
    return Counted(
        one.iteration,
        tuple(parts),
        tuple(dict.fromkeys(held)),
        (*mine, *theirs),
        (*one.stepped, *stepped),
    )


def _renamed(terms: Iterable[Term], numbers: Sequence[int]) -> tuple[Term, ...]:
    return tuple(Term(numbers[term.number], term.times) for term in terms)


def _alone(one: Counted) -> Counted:
    return dataclasses.replace(one, countings=tuple(map(_flat, one.countings)))


def _flat(counting: Counting) -> Counting:
    """A computation without the collectives that it went through."""
    parts = (*counting.parts, *(term for made in counting.made for term in made.parts))
    return dataclasses.replace(counting, made=(), sums=(), parts=parts)


def movement(measured: Iterable[Measured]) -> Movement:
    """What one rank says of how far a replay moved its parts of tensors."""
    found: Movement = []
    for one in measured:
        sums = one.sums or Sums(diff=math.inf)
        numbers = sums.n, repr(sums.diff), repr(sums.reference), repr(sums.worst)
        found.append((dataclasses.astuple(one.key), repr(one.region), *numbers))
    return found


def joined(each: Iterable[Movement]) -> Movement:
    """What several ranks say; of replicas the one that moved most."""
    found: dict[tuple[Any, ...], Any] = {}
    for said in each:
        for one in said:
            at = (*one[0], one[1])
            had = found.get(at)
            if had is None or float(one[3]) > float(had[3]):
                found[at] = one
    return list(found.values())


def moved(found: Movement, before: Mapping[TraceKey, Moved]) -> dict[TraceKey, Moved]:
    """Tensors with one more replay, of which all ranks told.

    Args:
        found: by :func:`joined`.
        before: of the replays until now.
    """
    total: dict[TraceKey, Sums] = {}
    for key, _, n, diff, reference, worst in found:
        part = Sums(n, diff=float(diff), reference=float(reference), worst=float(worst))
        iteration, microbatch, kind, name, index = key
        named = TraceKey(iteration, microbatch, Kind(kind), name, index)
        total[named] = total.get(named, Sums()) + part
    return {key: Moved.after(before.get(key), sums) for key, sums in total.items()}
