# SPDX-License-Identifier: Apache-2.0
"""The collectives of all ranks as one ledger, and what is wrong with them.

What must agree within a group: how often each operation ran, with its reduction, dtype and size,
and in which order. The size is the input's where all ranks have the same; the whole list's for
lists of unequal parts; none for an all-to-all, whose splits are each rank's own. A message must be
received as often as it is sent. Everything else may differ: stages and experts compute different
things.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megatron_ttrace.trace.collectives import (
    Collective,
    CollectiveRow,
    Group,
    Ledger,
    LedgerFault,
    LedgerFinding,
    Operation,
    Own,
    Phase,
    Ran,
    RanHere,
    RankLedger,
    Sources,
    pattern,
)
from megatron_ttrace.trace.counted import Runs, ranks_of

GroupName = Callable[[Sequence[int]], str]

_Signature = tuple[Operation, str, str, int]
_MESSAGES = (Operation.SEND, Operation.RECV)
_PASSES = (Phase.FORWARD, Phase.RECOMPUTATION, Phase.BACKWARD)


class _Alike:
    """Ranks that ran the same, each in groups of its own.

    Attributes:
        ran: what they ran, with a place: without a call in Megatron, the module's code.
        names: of their groups; ``sizes`` are these groups' numbers of members.
        rows: the same as the ledger has it, but without ranks.
        shared: numbers of the groups in which they ran more than messages.
    """

    def __init__(
        self, ran: Sequence[Ran], names: Sequence[str], sizes: Sequence[int], code: Sources
    ) -> None:
        self.ran = [_placed(one, code) for one in ran]
        self.names = names
        # Without what only the agreement needs.
        self.rows = [
            Collective(
                iteration=one.iteration,
                operation=one.operation,
                reduction=one.reduction,
                group=names[one.group],
                size=sizes[one.group],
                dtype=one.dtype,
                bytes=one.bytes,
                module=one.module,
                direction=one.direction,
                where=one.where,
                count=one.count,
                ranks=(),
            )
            for one in self.ran
        ]
        self.equal = {dataclasses.replace(one, count=0) for one in self.rows if one.bytes >= 0}
        groups = (one.group for one in self.ran if one.operation not in _MESSAGES)
        self.shared = list(dict.fromkeys(groups))

    @functools.cached_property
    def counts(self) -> dict[int, Counter[_Signature]]:
        """How often each operation ran, by group."""
        found = {group: Counter[_Signature]() for group in self.shared}
        for one in self.ran:
            if one.operation not in _MESSAGES:
                found[one.group][_signature(one)] += one.count
        return found

    def first(self, group: int, signature: _Signature) -> Ran | None:
        """The first of equal operations in a group."""
        alike = (o for o in self.ran if o.group == group and _signature(o) == signature)
        return next(alike, None)


class _Ranks:
    """All ranks, and what each ran."""

    def __init__(self, ranks: Sequence[RankLedger], name_of: GroupName, code: Sources) -> None:
        self.groups = [rank.groups for rank in ranks]
        self.own = [rank.own for rank in ranks]
        self._members: dict[Runs, tuple[int, ...]] = {}
        named: dict[tuple[str, Runs], str] = {}
        known: dict[object, _Alike] = {}
        self.alike: list[_Alike] = []
        for rank in ranks:
            names = []
            for one in rank.groups:
                key = one.name, one.members
                if key not in named:
                    named[key] = one.name or name_of(self.members(one))
                names.append(named[key])
            sizes = [len(self.members(one)) for one in rank.groups]
            # Ledgers that were folded have the same object.
            same = id(rank.ran), *names, *sizes
            if same not in known:
                known[same] = _Alike(rank.ran, names, sizes, code)
            self.alike.append(known[same])
        self.kinds = list(known.values())

    def members(self, group: Group) -> tuple[int, ...]:
        """The global ranks of a group."""
        if group.members not in self._members:
            self._members[group.members] = tuple(ranks_of(group.members))
        return self._members[group.members]


def merge(
    ranks: Sequence[RankLedger],
    name_of: GroupName,
    *,
    compute: str,
    gradients: str,
) -> Ledger:
    """One ledger out of those of all ranks, in the order of ranks.

    Args:
        ranks: what each rank recorded.
        name_of: names a group by its members, if its own description does not.
        compute: dtype of the activations.
        gradients: dtype in which gradients are reduced by the run's settings; empty if they leave
            it open.
    """
    code = _sources(ranks)
    known = _Ranks(ranks, name_of, code)
    recorded = not any(rank.error for rank in ranks)
    findings = [*_disagreements(known), *_messages(known)] if recorded else []
    findings += _imprecise(known, compute, gradients)
    return Ledger(_folded(known), tuple(_once(findings)), code, recorded)


def _placed(one: Ran, code: Sources) -> Ran:
    module = code.of(one.module)
    return dataclasses.replace(one, where=one.where or (module.forward if module else ""))


def _folded(known: _Ranks) -> tuple[Collective, ...]:
    """Equal collectives of several ranks are one, in the order in which they first ran."""
    ranks: dict[Collective, list[int]] = {}
    holders: dict[int, list[list[int]]] = {}
    for rank, alike in enumerate(known.alike):
        is_first = id(alike) not in holders
        shared = holders.setdefault(id(alike), [])
        for held in shared:
            held.append(rank)
        sizes: dict[int, list[Own]] = defaultdict(list)
        for one in known.own[rank]:
            sizes[one.number].append(one)
        counts: Counter[Collective] = Counter()
        for number in range(len(alike.rows)) if is_first else sizes:
            row = alike.rows[number]
            key = dataclasses.replace(row, count=0)
            for one in sizes.get(number, ()):
                counts[dataclasses.replace(key, bytes=one.bytes)] += one.times
            if number not in sizes:
                counts[key] += row.count
        for key, count in counts.items():
            held = ranks.setdefault(dataclasses.replace(key, count=count), [])
            held.append(rank)
            if is_first and key in alike.equal:
                shared.append(held)
    return tuple(dataclasses.replace(one, ranks=tuple(held)) for one, held in ranks.items())


def rows(collectives: Sequence[Collective]) -> tuple[CollectiveRow, ...]:
    """The collectives folded over layers, iterations and sizes, in the order of a step."""
    alike: dict[tuple[object, ...], list[Collective]] = {}
    for one in collectives:
        key = (
            *(one.operation, one.reduction, one.group, one.size, one.dtype),
            *(pattern(one.module), one.direction, one.where),
        )
        alike.setdefault(key, []).append(one)
    found = []
    for same in alike.values():
        counts: Counter[int] = Counter()
        for one in same:
            counts.update(dict.fromkeys(one.ranks, one.count))
        first = same[0]
        found.append(
            CollectiveRow(
                operation=first.operation,
                reduction=first.reduction,
                group=first.group,
                size=first.size,
                dtype=first.dtype,
                least=min(one.bytes for one in same),
                most=max(one.bytes for one in same),
                module=pattern(first.module),
                modules=len({one.module for one in same}),
                direction=first.direction,
                where=first.where,
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
    )


def _disagreements(known: _Ranks) -> Iterable[LedgerFinding]:
    """Operations that members of a group ran unequally often, or in different orders."""
    groups: dict[tuple[str, Runs], dict[int, int]] = defaultdict(dict)
    for rank, alike in enumerate(known.alike):
        for number in alike.shared:
            group = known.groups[rank][number]
            groups[group.communicator, group.members][rank] = number
    for ran in groups.values():
        rank, number = next(iter(ran.items()))
        name, group = known.alike[rank].names[number], known.groups[rank][number]
        members = known.members(group)
        own = {one: _own(known, one, ran.get(one)) for one in members}
        kinds = {id(counts): counts for counts, _ in own.values()}
        signatures = dict.fromkeys(one for counts in kinds.values() for one in counts)
        differ = [s for s in signatures if len({counts[s] for counts in kinds.values()}) > 1]
        for signature in differ:
            operation, reduction, dtype, size = signature
            here = {one: counts[signature] for one, (counts, _) in own.items()}
            first = {
                one: found
                for one, number in ran.items()
                if (found := known.alike[one].first(number, signature)) is not None
            }
            yield LedgerFinding(
                fault=LedgerFault.COUNT,
                group=name,
                members=members,
                ran=_by_ranks(here, first),
                operation=operation,
                reduction=reduction,
                dtype=dtype,
                bytes=size,
            )
        orders = dict.fromkeys(order for _, order in own.values())
        if not differ and len(orders) > 1:
            order_numbers = {order: number for number, order in enumerate(orders)}
            numbers = {one: order_numbers[order] for one, (_, order) in own.items()}
            yield LedgerFinding(
                fault=LedgerFault.ORDER, group=name, members=members, ran=_by_ranks(numbers, {})
            )


_NOTHING: Counter[_Signature] = Counter()


def _own(known: _Ranks, rank: int, number: int | None) -> tuple[Counter[_Signature], str]:
    """What a member ran in a group and in which order; ``number`` is the group's of this rank."""
    if number is None:
        return _NOTHING, ""
    return known.alike[rank].counts[number], known.groups[rank][number].order


def _messages(known: _Ranks) -> Iterable[LedgerFinding]:
    """Messages that are not received as often as they are sent."""
    sent: dict[tuple[int, int, str, int], dict[Operation, int]] = defaultdict(dict)
    first: dict[tuple[int, int, str, int, Operation], tuple[Ran, str]] = {}
    messages = {
        id(alike): [one for one in alike.ran if one.operation in _MESSAGES] for alike in known.kinds
    }
    # A message from anybody may be any of those that were sent to this rank.
    open_ends = {
        rank
        for rank, alike in enumerate(known.alike)
        if any(one.operation is Operation.RECV and one.peer < 0 for one in messages[id(alike)])
    }
    for rank, alike in enumerate(known.alike):
        for one in messages[id(alike)]:
            if one.peer < 0:
                continue
            peer = known.members(known.groups[rank][one.group])[one.peer]
            sends = one.operation is Operation.SEND
            key = *((rank, peer) if sends else (peer, rank)), one.dtype, one.bytes
            counts = sent[key]
            counts[one.operation] = counts.get(one.operation, 0) + one.count
            first.setdefault((*key, one.operation), (one, alike.names[one.group]))
    for (source, target, dtype, size), counts in sent.items():
        if target in open_ends or len({counts.get(op, 0) for op in _MESSAGES}) == 1:
            continue
        at = {op: first.get((source, target, dtype, size, op)) for op in _MESSAGES}
        ends = zip((source, target), _MESSAGES, strict=True)
        yield LedgerFinding(
            fault=LedgerFault.COUNT,
            group=next(found[1] for found in at.values() if found),
            members=(source, target),
            ran=tuple(
                _ran_here((rank,), counts.get(op, 0), found[0] if (found := at[op]) else None)
                for rank, op in ends
            ),
            operation=Operation.SEND,
            dtype=dtype,
            bytes=size,
        )


def _imprecise(known: _Ranks, compute: str, gradients: str) -> Iterable[LedgerFinding]:
    """Sums and means in a dtype with a larger machine epsilon than the settings say."""
    coarse = {
        id(alike): [
            (one, expected) for one in alike.ran if (expected := _coarse(one, compute, gradients))
        ]
        for alike in known.kinds
    }
    found: dict[tuple[str, _Signature, str], dict[int, Ran]] = defaultdict(dict)
    for rank, alike in enumerate(known.alike):
        for one, expected in coarse[id(alike)]:
            key = alike.names[one.group], _signature(one), expected
            found[key].setdefault(rank, one)
    for (name, (operation, reduction, dtype, size), expected), ran_by in found.items():
        rank, first = next(iter(ran_by.items()))
        yield LedgerFinding(
            fault=LedgerFault.PRECISION,
            group=name,
            members=known.members(known.groups[rank][first.group]),
            ran=(_ran_here(tuple(sorted(ran_by)), first.count, first),),
            operation=operation,
            reduction=reduction,
            dtype=dtype,
            bytes=size,
            expected=expected,
        )


def _coarse(one: Ran, compute: str, gradients: str) -> str:
    """The dtype in which a sum or a mean should be, if its own is coarser; else empty."""
    if one.direction is not Phase.GRADIENTS and one.direction not in _PASSES:
        return ""
    expected = gradients if one.direction is Phase.GRADIENTS else compute
    adds = one.operation.reduces and one.reduction not in ("max", "min")
    return expected if adds and expected and _epsilon(one.dtype) > _epsilon(expected) > 0 else ""


def _epsilon(dtype: str) -> float:
    """Machine epsilon of a dtype by its name; 0 for integers and for what is not known."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        return 0.0
    return float(torch.finfo(found).eps)


def _signature(one: Ran) -> _Signature:
    return one.operation, one.reduction, one.dtype, one.agreed


def _by_ranks(counts: Mapping[int, int], first: Mapping[int, Ran]) -> tuple[RanHere, ...]:
    alike: dict[int, list[int]] = {}
    for rank, count in counts.items():
        alike.setdefault(count, []).append(rank)
    return tuple(_ran_here(tuple(held), count, first.get(held[0])) for count, held in alike.items())


def _ran_here(ranks: tuple[int, ...], count: int, one: Ran | None) -> RanHere:
    return RanHere(ranks, count, *((one.module, one.where) if one else ()))


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
