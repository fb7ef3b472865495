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
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megatron_ttrace.trace.collectives import (
    Collective,
    CollectiveRow,
    Ledger,
    LedgerFault,
    LedgerFinding,
    Operation,
    Phase,
    Ran,
    RanHere,
    RankLedger,
    Sources,
)

GroupName = Callable[[Sequence[int]], str]

_Signature = tuple[Operation, str, str, int]
_MESSAGES = (Operation.SEND, Operation.RECV)
_PASSES = (Phase.FORWARD, Phase.RECOMPUTATION, Phase.BACKWARD)


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
    named = [[_completed(one, name_of, code) for one in rank.ran] for rank in ranks]
    recorded = not any(rank.error for rank in ranks)
    findings = [*_disagreements(ranks, named), *_messages(named)] if recorded else []
    findings += _imprecise(named, compute, gradients)
    return Ledger(_folded(named), tuple(_once(findings)), code, recorded)


def _completed(one: Ran, name_of: GroupName, code: Sources) -> Ran:
    """With a name for its group, and a place: without a call in Megatron, the module's code."""
    module = code.of(one.module)
    where = one.where or (module.forward if module else "")
    return dataclasses.replace(one, group=one.group or name_of(one.members), where=where)


def _folded(named: Sequence[Sequence[Ran]]) -> tuple[Collective, ...]:
    """Equal collectives of several ranks are one, in the order in which they first ran."""
    ranks: dict[Collective, list[int]] = {}
    for rank, found in enumerate(named):
        counts: Counter[Collective] = Counter()
        for one in found:
            # Without what only the agreement needs.
            key = Collective(
                one.iteration,
                one.operation,
                one.reduction,
                one.group,
                len(one.members),
                one.dtype,
                one.bytes,
                one.module,
                one.direction,
                one.where,
                0,
                (),
            )
            counts[key] += one.count
        for key, count in counts.items():
            ranks.setdefault(dataclasses.replace(key, count=count), []).append(rank)
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
                first.operation,
                first.reduction,
                first.group,
                first.size,
                first.dtype,
                min(one.bytes for one in same),
                max(one.bytes for one in same),
                pattern(first.module),
                len({one.module for one in same}),
                first.direction,
                first.where,
                max(counts.values()),
            )
        )
    order = {phase: number for number, phase in enumerate(Phase)}
    return tuple(sorted(found, key=lambda row: order[row.direction]))


def pattern(module: str) -> str:
    """A module's name without the numbers of its layer and its expert."""
    return re.sub(r"\b\d+\b", "*", module)


def _sources(ranks: Sequence[RankLedger]) -> Sources:
    codes: dict[object, int] = {}
    modules: dict[str, int] = {}
    for rank in ranks:
        for name, number in rank.sources.modules.items():
            if name not in modules and number < len(rank.sources.codes):
                modules[name] = codes.setdefault(rank.sources.codes[number], len(codes))
    first = ranks[0].sources if ranks else Sources()
    # One rank logs.
    metrics = {name: place for rank in ranks for name, place in rank.sources.metrics.items()}
    return dataclasses.replace(
        first,
        modules=modules,
        codes=tuple(codes),  # type: ignore[arg-type]
        metrics=metrics,
    )


def _disagreements(
    ranks: Sequence[RankLedger], named: Sequence[Sequence[Ran]]
) -> Iterable[LedgerFinding]:
    """Operations that members of a group ran unequally often, or in different orders."""
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, list[Ran]]] = defaultdict(dict)
    for rank, found in enumerate(named):
        for one in found:
            if one.operation not in _MESSAGES:
                group = by_group[one.communicator, one.members]
                group.setdefault(rank, []).append(one)
    for (communicator, members), ran in by_group.items():
        counts = {rank: _counts(ran.get(rank, ())) for rank in members}
        signatures = dict.fromkeys(one for rank in members for one in counts[rank])
        name = next(one.group for found in ran.values() for one in found)
        differ = [s for s in signatures if len({counts[rank][s] for rank in members}) > 1]
        for signature in differ:
            operation, reduction, dtype, size = signature
            here = {rank: counts[rank][signature] for rank in members}
            first = {
                rank: one
                for rank, found in ran.items()
                for one in reversed(found)
                if _signature(one) == signature
            }
            yield LedgerFinding(
                LedgerFault.COUNT,
                name,
                members,
                _by_ranks(here, first),
                operation,
                reduction,
                dtype,
                size,
            )
        orders = {rank: ranks[rank].order.get(communicator, "") for rank in members}
        if not differ and len(set(orders.values())) > 1:
            kinds = {order: number for number, order in enumerate(dict.fromkeys(orders.values()))}
            numbers = {rank: kinds[order] for rank, order in orders.items()}
            yield LedgerFinding(LedgerFault.ORDER, name, members, _by_ranks(numbers, {}))


def _messages(named: Sequence[Sequence[Ran]]) -> Iterable[LedgerFinding]:
    """Messages that are not received as often as they are sent."""
    sent: dict[tuple[int, int, str, int], dict[Operation, int]] = defaultdict(dict)
    first: dict[tuple[int, int, str, int, Operation], Ran] = {}
    # A message from anybody may be any of those that were sent to this rank.
    open_ends = {
        rank
        for rank, found in enumerate(named)
        if any(one.operation is Operation.RECV and one.peer < 0 for one in found)
    }
    for rank, found in enumerate(named):
        for one in found:
            if one.operation not in _MESSAGES or one.peer < 0:
                continue
            sends = one.operation is Operation.SEND
            pair = (rank, one.peer) if sends else (one.peer, rank)
            key = *pair, one.dtype, one.bytes
            known = sent[key]
            known[one.operation] = known.get(one.operation, 0) + one.count
            first.setdefault((*key, one.operation), one)
    for (source, target, dtype, size), counts in sent.items():
        if target in open_ends or len({counts.get(op, 0) for op in _MESSAGES}) == 1:
            continue
        key = source, target, dtype, size
        one = next(first[*key, op] for op in _MESSAGES if (*key, op) in first)
        ends = zip((source, target), _MESSAGES, strict=True)
        yield LedgerFinding(
            LedgerFault.COUNT,
            one.group,
            (source, target),
            tuple(
                _ran_here((rank,), counts.get(op, 0), first.get((*key, op))) for rank, op in ends
            ),
            Operation.SEND,
            dtype=dtype,
            bytes=size,
        )


def _imprecise(
    named: Sequence[Sequence[Ran]], compute: str, gradients: str
) -> Iterable[LedgerFinding]:
    """Sums and means in a dtype with a larger machine epsilon than the settings say."""
    found: dict[tuple[str, _Signature, str], dict[int, Ran]] = defaultdict(dict)
    for rank, ran in enumerate(named):
        for one in ran:
            expected = gradients if one.direction is Phase.GRADIENTS else compute
            if one.direction is not Phase.GRADIENTS and one.direction not in _PASSES:
                continue
            adds = one.operation.reduces and one.reduction not in ("max", "min")
            if adds and expected and _epsilon(one.dtype) > _epsilon(expected) > 0:
                found[one.group, _signature(one), expected].setdefault(rank, one)
    for (group, (operation, reduction, dtype, size), expected), ran_by in found.items():
        first = next(iter(ran_by.values()))
        ranks = tuple(sorted(ran_by))
        yield LedgerFinding(
            LedgerFault.PRECISION,
            group,
            first.members,
            (_ran_here(ranks, first.count, first),),
            operation,
            reduction,
            dtype,
            size,
            expected,
        )


def _epsilon(dtype: str) -> float:
    """Machine epsilon of a dtype by its name; 0 for integers and for what is not known."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        return 0.0
    return float(torch.finfo(found).eps)


def _signature(one: Ran) -> _Signature:
    return one.operation, one.reduction, one.dtype, one.agreed


def _counts(ran: Iterable[Ran]) -> Counter[_Signature]:
    counts: Counter[_Signature] = Counter()
    for one in ran:
        counts[_signature(one)] += one.count
    return counts


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
