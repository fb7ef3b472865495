# SPDX-License-Identifier: Apache-2.0
"""The shards of a reference on several ranks become the trace that a single device would write.

One tensor is put together at a time, from mapped files, and written: no process holds more than one
whole tensor and the writer's buffers. Ranks that hold the same elements must have the same bits:
replicas that differ make the reference itself wrong.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.moved import Moved
from megatron_ttrace.saved.whole import Shards
from megatron_ttrace.trace.counted import Counted, Counting, Part, Term
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import MOMENTS, STEP_LEVEL, Direction, Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter

Movement = list[tuple[tuple[Any, ...], str, int, float, float, float]]
"""Of each part of a tensor: key, region, elements, sums of squares of the difference and of the
reference, and the largest difference."""


def merge(directory: Path, stages: Sequence[int], writer: TraceWriter) -> None:
    """Write the logical tensors of all ranks' shards; the writer stays open.

    ``stages`` are the pipeline stages of the ranks.

    Raises:
        TTraceError: when ranks lack a part of a tensor, or disagree on one.
    """
    trace = TraceReader(directory, sealed=False)
    shards = Shards(trace)
    lines: dict[TraceKey, int] = {}
    for key in in_order(shards, stages):
        if key.kind is Kind.INITIAL:
            if (initial := shards.initial(key)) is None:
                raise TTraceError(f"the reference's ranks lack a part of {key}")
            writer.add(initial, None)
            continue
        tensor = shards.tensor(key)
        if tensor is None:
            raise TTraceError(f"the reference's ranks lack a part of {key}")
        if ranks := shards.conflicting(key, tensor):
            raise TTraceError(
                f"the reference's ranks {', '.join(map(str, ranks))} differ from other ranks in "
                f"{key}: the reference is wrong, or its step is not deterministic"
            )
        first_name = _first_name(trace, shards, key)
        line = None if first_name is None else lines.get(first_name)
        entry = Entry.of(key, tensor)
        if line is None:
            lines[key] = writer.add(entry, tensor)
        else:
            writer.add(dataclasses.replace(entry, same_as=line), None)


def _first_name(trace: TraceReader, shards: Shards, key: TraceKey) -> TraceKey | None:
    """The first name of the same tensor, if it has one on all ranks that hold it."""
    first_names = set()
    for rank, number in shards.holders(key):
        entry = trace.ranks[rank][number]
        if entry.same_as < 0:
            return None
        first = trace.ranks[rank][entry.same_as]
        if (first.boxes, first.logical_shape) != (entry.boxes, entry.logical_shape):
            return None
        first_names.add(first.key)
    return first_names.pop() if len(first_names) == 1 else None


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
                rank, line = max(shards.holders(key), key=lambda at: (stages[at[0]], -at[0]))
                stage = -stages[rank]
            return key.iteration, 1, key.microbatch, int(backward), stage, line, rank
        begins = key.direction is Direction.START
        # The moments of a parameter come after its change.
        kind = Kind.PARAM_DELTA if key.kind in MOMENTS else key.kind
        group = kinds.setdefault((kind, key.index), len(kinds))
        return key.iteration, 0 if begins else 2, group, 0, stage, line, rank

    return sorted(shards, key=place)


def merged(counted: Iterable[Sequence[Counted]]) -> list[Counted]:
    """What all ranks of a reference counted, as one device that has all parameters counts it."""
    by_iteration: dict[int, Counted] = {}
    for step in itertools.chain.from_iterable(counted):
        flat = dataclasses.replace(step, countings=tuple(map(_flat, step.countings)))
        before = by_iteration.get(step.iteration)
        by_iteration[step.iteration] = flat if before is None else _joined(before, flat)
    return list(by_iteration.values())


def _joined(first: Counted, second: Counted) -> Counted:
    parts = list(first.parts)
    numbers: dict[Part, int] = {part: number for number, part in enumerate(parts)}
    renumbered = []
    for part in second.parts:
        if part not in numbers:
            numbers[part] = len(parts)
            parts.append(part)
        renumbered.append(numbers[part])

    def terms(terms: Iterable[Term]) -> tuple[Term, ...]:
        return tuple(Term(renumbered[term.number], term.times) for term in terms)

    countings = (dataclasses.replace(c, parts=terms(c.parts)) for c in second.countings)
    stepped = (dataclasses.replace(group, parts=terms(group.parts)) for group in second.stepped)
    return Counted(
        first.iteration,
        tuple(parts),
        tuple(dict.fromkeys((*first.held, *(renumbered[number] for number in second.held)))),
        (*first.countings, *countings),
        (*first.stepped, *stepped),
    )


def _flat(counting: Counting) -> Counting:
    """A computation without the collectives that it went through."""
    parts = (*counting.parts, *(term for made in counting.made for term in made.parts))
    return dataclasses.replace(counting, made=(), sums=(), parts=parts)


def movement(measured: Iterable[Measured]) -> Movement:
    """How far a replay moved one rank's parts of tensors."""
    parts: Movement = []
    for part in measured:
        sums = part.sums or Sums(diff=math.inf)
        numbers = sums.n, sums.diff, sums.reference, sums.worst
        parts.append((dataclasses.astuple(part.key), repr(part.region), *numbers))
    return parts


def joined(movements: Iterable[Movement]) -> Movement:
    """The movement of several ranks; of replicas the one that moved most."""
    parts: dict[tuple[Any, ...], Any] = {}
    for part in itertools.chain.from_iterable(movements):
        at = (*part[0], part[1])
        if at not in parts or part[3] > parts[at][3]:
            parts[at] = part
    return list(parts.values())


def moved(movement: Movement, before: Mapping[TraceKey, Moved]) -> dict[TraceKey, Moved]:
    """Tensors with one more replay: the :func:`joined` movement of all ranks."""
    total: dict[TraceKey, Sums] = {}
    for (iteration, microbatch, value, name, index), _, n, diff, reference, worst in movement:
        part = Sums(n, diff=diff, reference=reference, worst=worst)
        kind = Kind(value)  # type: ignore[call-arg]
        key = TraceKey(iteration, microbatch, kind, name, index)
        total[key] = total.get(key, Sums()) + part
    return {key: Moved.after(before.get(key), sums) for key, sums in total.items()}
