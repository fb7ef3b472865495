# SPDX-License-Identifier: Apache-2.0
"""The collectives of all ranks as one ledger, and what is wrong with them.

What must agree within a group: how often each operation ran, with its reduction, dtype and size,
and in which order. The size is the input's where all ranks have the same; the whole list's for
lists of unequal parts; none for an all-to-all, whose splits are each rank's own. A message must be
received as often as it is sent. Everything else may differ: stages and experts compute different
things.
"""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ttrace.trace.collectives import (
    Call,
    Calls,
    Collective,
    CollectiveRow,
    Function,
    FunctionCall,
    Group,
    Ledger,
    LedgerFault,
    LedgerFinding,
    Lookup,
    Numbers,
    Operation,
    Phase,
    RanHere,
    RankLedger,
    Shard,
    Size,
    Sources,
    pattern,
)
from megatron_ttrace.trace.counted import Runs, ranks_of

GroupName = Callable[[Sequence[int]], str]


class _Signature(NamedTuple):
    """What must agree; ``bytes`` are those that all members have in common, or -1."""

    operation: Operation
    reduction: str
    dtype: str
    bytes: int


_OF_A_CALL = ("iteration", "operation", "reduction", "dtype", "module", "direction", "where")
"""Fields that a :class:`Collective` has from the :class:`Call`."""
_OF_A_ROW = ("operation", "reduction", "group", "size", "dtype", "direction", "where")
"""Fields that the collectives of a row have in common."""
_MESSAGES = (Operation.SEND, Operation.RECV)
_PASSES = (Phase.FORWARD, Phase.RECOMPUTATION, Phase.BACKWARD)


class _Alike:
    """What ranks ran whose calls and counts are equal.

    Attributes:
        calls: with a place: without one in Megatron, the module's code.
        counts: how often each call ran.
        ran: how often each operation ran, by group; without messages.
    """

    def __init__(self, calls: Sequence[Call], counts: Sequence[int]) -> None:
        self.calls, self.counts = calls, counts
        self.ran: dict[int, Counter[_Signature]] = {}
        for call, count in zip(calls, counts, strict=True):
            if call.operation not in _MESSAGES:
                self.ran.setdefault(call.group, Counter())[_signature(call)] += count

    def first(self, group: int, signature: _Signature) -> Call | None:
        """The first of equal operations in a group."""
        alike = (c for c in self.calls if c.group == group and _signature(c) == signature)
        return next(alike, None)


class _Rank(NamedTuple):
    """A rank; ``named`` has name and members of each of its groups."""

    alike: _Alike
    sizes: tuple[tuple[Size, ...], ...]
    groups: tuple[Group, ...]
    named: list[tuple[str, tuple[int, ...]]]


def _ranks(ledgers: Sequence[RankLedger], name_of: GroupName, code: Sources) -> list[_Rank]:
    @functools.cache
    def named(name: str, runs: Runs) -> tuple[str, tuple[int, ...]]:
        members = tuple(ranks_of(runs))
        return name or name_of(members), members

    # Ledgers that were folded have the same objects.
    placed: dict[int, tuple[Call, ...]] = {}
    alike: dict[tuple[int, tuple[int, ...]], _Alike] = {}
    ranks = []
    for ledger in ledgers:
        same = id(ledger.calls)
        if same not in placed:
            placed[same] = tuple(_placed(call, code) for call in ledger.calls)
        counts = tuple(sum(times for _, times in sizes) for sizes in ledger.sizes)
        if (same, counts) not in alike:
            alike[same, counts] = _Alike(placed[same], counts)
        groups = [named(group.name, group.members) for group in ledger.groups]
        ranks.append(_Rank(alike[same, counts], ledger.sizes, ledger.groups, groups))
    return ranks


def merge(
    ranks: Sequence[RankLedger],
    name_of: GroupName,
    *,
    compute: str,
    gradients: str,
) -> Ledger:
    """One ledger out of those of all ranks, in the order of ranks.

    ``name_of`` names a group by its members, if its own description does not. ``compute`` is the
    dtype of activations, ``gradients`` that in which gradients are reduced by the run's settings;
    empty if they leave it open.
    """
    code = _sources(ranks)
    known = _ranks(ranks, name_of, code)
    recorded = not any(rank.error for rank in ranks)
    findings = [*_disagreements(known), *_messages(known)] if recorded else []
    findings += _imprecise(known, compute, gradients)
    apart = {id(rank.apart): rank.apart for rank in ranks}  # most ranks have the same
    return Ledger(
        _folded(known),
        tuple(_once(findings)),
        code,
        recorded,
        numbers=_numbers(ranks),
        torn=torn(ranks) if recorded else (),
        apart=tuple(dict.fromkeys(f for each in apart.values() for f in each)),
    )


def _placed(call: Call, code: Sources) -> Call:
    module = code.of(call.module)
    return dataclasses.replace(call, where=call.where or (module.forward if module else ""))


def _folded(ranks: Sequence[_Rank]) -> tuple[Collective, ...]:
    """Equal collectives of several ranks are one, in the order in which they first ran."""
    lines: dict[Collective, int] = {}
    numbers: dict[tuple[int, str, int, int], int] = {}
    ran_by: dict[tuple[int, int], list[int]] = {}
    for number, rank in enumerate(ranks):
        counts: Counter[int] = Counter()
        for call, sizes in zip(rank.alike.calls, rank.sizes, strict=True):
            name, members = rank.named[call.group]
            for size, times in sizes:
                key = id(call), name, len(members), size
                if key not in numbers:
                    collective = Collective(
                        **{field: getattr(call, field) for field in _OF_A_CALL},
                        group=name,
                        size=len(members),
                        bytes=size,
                        count=0,
                        ranks=(),
                    )
                    numbers[key] = lines.setdefault(collective, len(lines))
                counts[numbers[key]] += times
        for line, count in counts.items():
            ran_by.setdefault((line, count), []).append(number)
    found = list(lines)
    return tuple(
        dataclasses.replace(found[line], count=count, ranks=tuple(holders))
        for (line, count), holders in ran_by.items()
    )


def rows(collectives: Sequence[Collective]) -> tuple[CollectiveRow, ...]:
    """The collectives folded over layers, iterations and sizes, in the order of a step."""
    alike: dict[tuple[Any, ...], list[Collective]] = {}
    for one in collectives:
        key = pattern(one.module), *(getattr(one, field) for field in _OF_A_ROW)
        alike.setdefault(key, []).append(one)
    found = []
    for (module, *shared), same in alike.items():
        counts: Counter[int] = Counter()
        for one in same:
            counts.update(dict.fromkeys(one.ranks, one.count))
        found.append(
            CollectiveRow(
                **dict(zip(_OF_A_ROW, shared, strict=True)),
                least=min(one.bytes for one in same),
                most=max(one.bytes for one in same),
                module=module,
                modules=len({one.module for one in same}),
                count=max(counts.values()),
            )
        )
    order = {phase: number for number, phase in enumerate(Phase)}
    return tuple(sorted(found, key=lambda row: order[row.direction]))


def _sources(ranks: Sequence[RankLedger]) -> Sources:
    codes: dict[object, int] = {}
    modules: dict[str, int] = {}
    for sources in {id(rank.sources): rank.sources for rank in ranks}.values():
        for name, number in sources.modules.items():
            if name not in modules and number < len(sources.codes):
                modules[name] = codes.setdefault(sources.codes[number], len(codes))
    first = ranks[0].sources if ranks else Sources()
    # One rank logs.
    metrics = {name: place for rank in ranks for name, place in rank.sources.metrics.items()}
    return dataclasses.replace(
        first,
        modules=modules,
        codes=tuple(codes),  # type: ignore[arg-type]
        metrics=metrics,
        calls=_calls([rank.sources.calls for rank in ranks]),
    )


def _calls(ranks: Iterable[Calls]) -> Calls:
    """The calls of all ranks, each once; ranks that ran the same have one object."""
    functions: dict[Function, int] = {}
    calls: dict[FunctionCall, None] = {}
    lookups: dict[Lookup, None] = {}
    marks: dict[str, tuple[str, ...]] = {}
    buckets: dict[str, str] = {}
    partial: dict[str, tuple[str, ...]] = {}
    for each in {id(calls): calls for calls in ranks}.values():
        numbers = [functions.setdefault(one, len(functions)) for one in each.functions]
        for call in each.calls:
            caller = numbers[call.caller] if call.caller >= 0 else -1
            calls[call._replace(function=numbers[call.function], caller=caller)] = None
        for lookup in each.lookups:
            lookups[lookup._replace(function=numbers[lookup.function])] = None
        for name, marked in each.marks.items():
            if differing := {*marked} ^ {*marks.get(name, marked)}:
                partial[name] = tuple(sorted({*differing, *partial.get(name, ())}))
        marks = {**each.marks, **marks}
        buckets = {**each.buckets, **buckets}
    return Calls(
        functions=tuple(functions),
        calls=tuple(calls),
        marks=marks,
        lookups=tuple(lookups),
        buckets=buckets,
        partial=partial,
    )


def _numbers(ranks: Iterable[RankLedger]) -> Numbers:
    """The numbers of all ranks."""
    merged: dict[str, dict[str, set[float]]] = defaultdict(lambda: defaultdict(set))
    for numbers in {id(rank.numbers): rank.numbers for rank in ranks}.values():
        for where, named in numbers.items():
            for name, values in named.items():
                merged[where][name].update(values)
    return {
        where: {name: tuple(sorted(values)) for name, values in named.items()}
        for where, named in merged.items()
    }


def torn(ranks: Sequence[RankLedger]) -> tuple[str, ...]:
    """Parameters whose shards lack elements, or have some on more ranks than others.

    Each replica of the division, for instance of another tensor-parallel rank, has all elements
    once. So over all ranks all elements are had equally often.
    """
    shards: dict[str, Counter[Shard]] = defaultdict(Counter)
    for rank in ranks:
        for name in rank.sources.calls.buckets:
            shards[name].update()
        for name, shard in rank.shards.items():
            shards[name][shard] += 1
    return tuple(name for name, counts in shards.items() if not _is_whole(counts))


def _is_whole(shards: Counter[Shard]) -> bool:
    changes: Counter[int] = Counter()
    for (start, end, _), times in shards.items():
        changes[start] += times
        changes[end] -= times
    at = sorted(position for position, change in changes.items() if change)
    sizes = {shard.size for shard in shards}
    return len(sizes) == 1 and at == [0, *sizes]


def _disagreements(ranks: Sequence[_Rank]) -> Iterable[LedgerFinding]:
    """Operations that members of a group ran unequally often, or in different orders."""
    groups: dict[tuple[str, Runs], dict[int, int]] = defaultdict(dict)
    for number, rank in enumerate(ranks):
        for at in rank.alike.ran:
            group = rank.groups[at]
            groups[group.communicator, group.members][number] = at
    for places in groups.values():
        first, at = next(iter(places.items()))
        name, members = ranks[first].named[at]
        ran = {number: ranks[number].alike.ran[at] for number, at in places.items()}
        counts = {member: ran.get(member, _NOTHING) for member in members}
        signatures = dict.fromkeys(signature for count in counts.values() for signature in count)
        differ = [s for s in signatures if len({count[s] for count in counts.values()}) > 1]
        for signature in differ:
            calls = {
                number: ranks[number].alike.first(at, signature) for number, at in places.items()
            }
            yield LedgerFinding(
                fault=LedgerFault.COUNT,
                group=name,
                members=members,
                ran=_by_ranks({rank: count[signature] for rank, count in counts.items()}, calls),
                **signature._asdict(),
            )
        order = {number: ranks[number].groups[at].order for number, at in places.items()}
        orders = list(dict.fromkeys(order.get(member, "") for member in members))
        if not differ and len(orders) > 1:
            numbers = {member: orders.index(order.get(member, "")) for member in members}
            yield LedgerFinding(
                fault=LedgerFault.ORDER, group=name, members=members, ran=_by_ranks(numbers, {})
            )


_NOTHING: Counter[_Signature] = Counter()


def _messages(ranks: Sequence[_Rank]) -> Iterable[LedgerFinding]:
    """Messages that are not received as often as they are sent."""
    sent: dict[tuple[int, int, str, int], Counter[Operation]] = defaultdict(Counter)
    first: dict[tuple[int, int, str, int, Operation], tuple[Call, str]] = {}
    # A message from anybody may be any of those that were sent to this rank.
    open_ends = set()
    for rank, each in enumerate(ranks):
        for call, sizes in zip(each.alike.calls, each.sizes, strict=True):
            if call.operation not in _MESSAGES:
                continue
            if call.peer < 0:
                open_ends.add(rank)
                continue
            name, members = each.named[call.group]
            peer, sends = members[call.peer], call.operation is Operation.SEND
            for size, times in sizes:
                key = *((rank, peer) if sends else (peer, rank)), call.dtype, size
                sent[key][call.operation] += times
                first.setdefault((*key, call.operation), (call, name))
    for (source, target, dtype, size), counts in sent.items():
        if target in open_ends or len({counts[operation] for operation in _MESSAGES}) == 1:
            continue
        ends = [first.get((source, target, dtype, size, op), (None, "")) for op in _MESSAGES]
        yield LedgerFinding(
            fault=LedgerFault.COUNT,
            group=next(name for call, name in ends if call),
            members=(source, target),
            ran=tuple(
                _ran_here((rank,), counts[operation], call)
                for rank, operation, (call, _) in zip(
                    (source, target), _MESSAGES, ends, strict=True
                )
            ),
            operation=Operation.SEND,
            dtype=dtype,
            bytes=size,
        )


def _imprecise(ranks: Sequence[_Rank], compute: str, gradients: str) -> Iterable[LedgerFinding]:
    """Sums and means in a dtype with a larger machine epsilon than the settings say."""
    coarse = {
        id(rank.alike): [
            (call, count, expected)
            for call, count in zip(rank.alike.calls, rank.alike.counts, strict=True)
            if (expected := _coarse(call, compute, gradients))
        ]
        for rank in {id(rank.alike): rank for rank in ranks}.values()
    }
    ran: dict[tuple[str, _Signature, str], dict[int, tuple[Call, int]]] = defaultdict(dict)
    for number, rank in enumerate(ranks):
        for call, count, expected in coarse[id(rank.alike)]:
            key = rank.named[call.group][0], _signature(call), expected
            ran[key].setdefault(number, (call, count))
    for (name, signature, expected), calls in ran.items():
        number, (call, count) = next(iter(calls.items()))
        yield LedgerFinding(
            fault=LedgerFault.PRECISION,
            group=name,
            members=ranks[number].named[call.group][1],
            ran=(_ran_here(tuple(calls), count, call),),
            expected=expected,
            **signature._asdict(),
        )


def _coarse(call: Call, compute: str, gradients: str) -> str:
    """The dtype in which a sum or a mean should be, if its own is coarser; else empty."""
    expected = {Phase.GRADIENTS: gradients, **dict.fromkeys(_PASSES, compute)}
    if 0 < call.agreed <= 2:  # one number: a statistic, such as the gradients' norm
        expected[Phase.OPTIMIZER] = "float32"
    wanted = expected.get(call.direction, "")
    adds = call.operation.reduces and call.reduction not in ("max", "min")
    return wanted if adds and wanted and _epsilon(call.dtype) > _epsilon(wanted) > 0 else ""


@functools.cache
def _epsilon(dtype: str) -> float:
    """Machine epsilon of a dtype by its name; 0 for integers and for what is not known."""
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        return 0.0
    return float(torch.finfo(known).eps)


def _signature(call: Call) -> _Signature:
    return _Signature(call.operation, call.reduction, call.dtype, call.agreed)


def _by_ranks(counts: Mapping[int, int], calls: Mapping[int, Call | None]) -> tuple[RanHere, ...]:
    alike: dict[int, list[int]] = {}
    for rank, count in counts.items():
        alike.setdefault(count, []).append(rank)
    return tuple(
        _ran_here(tuple(ranks), count, calls.get(ranks[0])) for count, ranks in alike.items()
    )


def _ran_here(ranks: tuple[int, ...], count: int, call: Call | None) -> RanHere:
    return RanHere(ranks, count, *((call.module, call.where) if call else ()))


def _once(findings: Iterable[LedgerFinding]) -> Iterable[LedgerFinding]:
    """One finding for the groups of one name that show the same."""
    alike: dict[tuple[object, ...], list[LedgerFinding]] = {}
    for one in findings:
        key = one.fault, one.group, one.operation, one.reduction, one.dtype, one.expected
        size = one.bytes if one.fault is LedgerFault.COUNT else -1
        alike.setdefault((*key, size), []).append(one)
    for first, *others in alike.values():
        groups = {first.members, *(other.members for other in others)}
        yield dataclasses.replace(first, groups=len(groups))
