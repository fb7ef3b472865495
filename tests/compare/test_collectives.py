# SPDX-License-Identifier: Apache-2.0
"""What must agree between ranks is compared; what may differ is not."""

import dataclasses
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare.collectives import _OF_A_CALL, merge, rows
from megatron_ttrace.run import recording
from megatron_ttrace.trace import folded
from megatron_ttrace.trace.collectives import (
    Call,
    Calls,
    Collective,
    Group,
    Ledger,
    LedgerFault,
    ModuleCode,
    Operation,
    Phase,
    RankLedger,
    Shard,
    Size,
    Sources,
)
from megatron_ttrace.trace.counted import runs_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Called(Collective):
    """A collective with its group; the peer is a global rank."""

    size: int = 0
    ranks: tuple[int, ...] = ()
    members: tuple[int, ...]
    communicator: str
    agreed: int
    peer: int


SUM = Called(
    iteration=1,
    operation=Operation.ALL_REDUCE,
    reduction="sum",
    group="tp",
    members=(0, 1),
    communicator="1",
    dtype="bfloat16",
    bytes=64,
    agreed=64,
    peer=-1,
    module="decoder.layers.0.mlp.linear_fc2",
    direction=Phase.FORWARD,
    where="megatron/core/a.py:1 (reduce)",
    count=2,
)
OTHER_LAYER = dataclasses.replace(SUM, module="decoder.layers.1.mlp.linear_fc2")


def ledger(*ranks: RankLedger, compute: str = "bfloat16", gradients: str = "float32") -> Ledger:
    """The ledger of a job; groups without a name are called ``ranks``."""
    return merge(ranks, lambda members: "ranks", compute=compute, gradients=gradients)


def rank(*called: Called, order: str = "a") -> RankLedger:
    """What a rank recorded, with one order for all its groups."""
    groups = dict.fromkeys((one.group, one.members, one.communicator) for one in called)
    numbers = {group: number for number, group in enumerate(groups)}
    calls: dict[Call, Counter[int]] = {}
    for one in called:
        varies = one.operation is Operation.ALL_TO_ALL
        call = Call(
            **{field: getattr(one, field) for field in _OF_A_CALL},
            group=numbers[one.group, one.members, one.communicator],
            agreed=-1 if varies else one.agreed,
            peer=one.members.index(one.peer) if one.peer >= 0 else -1,
        )
        calls.setdefault(call, Counter())[one.bytes] += one.count
    return RankLedger(
        tuple(calls),
        tuple(tuple(map(Size._make, sizes.items())) for sizes in calls.values()),
        tuple(Group(n, runs_of(m), c, order) for n, m, c in groups),
    )


def test_equal_ranks() -> None:
    """One line for both ranks; nothing is wrong."""
    found = ledger(rank(SUM, OTHER_LAYER), rank(SUM, OTHER_LAYER))
    assert (found.findings, found.recorded) == ((), True)
    assert [(one.module, one.count, one.ranks) for one in found.collectives] == [
        (SUM.module, 2, (0, 1)),
        (OTHER_LAYER.module, 2, (0, 1)),
    ]
    (row,) = rows(found.collectives)
    assert (row.module, row.modules, row.count) == ("decoder.layers.*.mlp.linear_fc2", 2, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"agreed": 32},
        {"reduction": "avg"},
        {"operation": Operation.REDUCE_SCATTER},
        {"count": 3},
    ],
)
def test_unequal_ranks(change: dict[str, object]) -> None:
    """Operation, reduction, dtype, size and number must agree; both sides are told."""
    found = ledger(rank(SUM), rank(dataclasses.replace(SUM, **change)))
    first = found.findings[0]
    assert {one.fault for one in found.findings} == {LedgerFault.COUNT}
    assert (first.group, first.members, first.operation) == ("tp", (0, 1), SUM.operation)
    assert [(one.ranks, one.count) for one in first.ran] == [
        ((0,), 2),
        ((1,), 3 if "count" in change else 0),
    ]
    assert first.ran[0].where == SUM.where


def test_a_rank_without() -> None:
    """A member that ran nothing in a group counts, too; so do equal groups, once."""
    two, three = (dataclasses.replace(SUM, members=(2, 3), communicator="2") for _ in range(2))
    found = ledger(rank(SUM), rank(), rank(two), rank())
    (finding,) = found.findings
    assert (finding.members, finding.groups) == ((0, 1), 2)
    assert [(one.ranks, one.count) for one in finding.ran] == [((0,), 2), ((1,), 0)]
    assert ledger(rank(SUM), rank(SUM), rank(two), rank(three)).findings == ()


def test_order() -> None:
    """The same operations in another order."""
    (finding,) = ledger(rank(SUM), rank(SUM, order="b")).findings
    assert (finding.fault, finding.operation) == (LedgerFault.ORDER, None)
    assert [one.ranks for one in finding.ran] == [(0,), (1,)]


def test_what_may_differ() -> None:
    """Own splits of an all-to-all, modules, places, and what other groups run."""
    split = dataclasses.replace(SUM, operation=Operation.ALL_TO_ALL, reduction="", agreed=-1)
    own = dataclasses.replace(split, bytes=8, module="other", where="elsewhere")
    alone = dataclasses.replace(SUM, members=(1, 2), communicator="3", bytes=8, agreed=8)
    assert not ledger(rank(split), rank(own, alone), rank(alone)).findings


def test_messages() -> None:
    """What is sent must be received."""
    send = dataclasses.replace(
        SUM, operation=Operation.SEND, reduction="", group="pp", agreed=-1, peer=1
    )
    receive = dataclasses.replace(send, operation=Operation.RECV, peer=0)
    assert not ledger(rank(send), rank(receive)).findings
    (finding,) = ledger(rank(send), rank(dataclasses.replace(receive, count=1))).findings
    assert (finding.fault, finding.members, finding.bytes) == (LedgerFault.COUNT, (0, 1), 64)
    assert [one.count for one in finding.ran] == [2, 1]
    lost = ledger(rank(send), rank(dataclasses.replace(receive, bytes=32))).findings
    assert [[one.count for one in each.ran] for each in lost] == [[2, 0], [0, 2]]
    anybody = dataclasses.replace(receive, peer=-1)
    assert not ledger(rank(send), rank(anybody)).findings


@pytest.mark.parametrize(
    ("dtype", "direction", "reduction", "expected"),
    [
        ("bfloat16", Phase.GRADIENTS, "sum", "float32"),
        ("float16", Phase.GRADIENTS, "avg", "float32"),
        ("float8_e4m3fn", Phase.FORWARD, "sum", "bfloat16"),
        ("bfloat16", Phase.GRADIENTS, "max", ""),
        ("float32", Phase.GRADIENTS, "sum", ""),
        ("int64", Phase.GRADIENTS, "sum", ""),
        ("bfloat16", Phase.BACKWARD, "sum", ""),
        ("float16", Phase.BACKWARD, "sum", ""),
        ("float8_e4m3fn", Phase.OTHER, "sum", ""),
    ],
)
def test_precision(dtype: str, direction: Phase, reduction: str, expected: str) -> None:
    """Sums of gradients have the dtype of the settings, if any, others that of the activations."""
    one = dataclasses.replace(SUM, dtype=dtype, direction=direction, reduction=reduction)
    found = ledger(rank(one), rank(one)).findings
    assert [each.expected for each in found] == [expected] * bool(expected)
    is_gradient = direction is Phase.GRADIENTS
    assert not (is_gradient and ledger(rank(one), rank(one), gradients="").findings)
    for finding in found:
        assert (finding.fault, finding.ran[0].ranks) == (LedgerFault.PRECISION, (0, 1))


@pytest.mark.parametrize(("size", "expected"), [(2, ["float32"]), (64, [])])
def test_precision_of_statistics(size: int, expected: list[str]) -> None:
    """A norm is one number, which loses digits in 16 bits; products of matrices may be in those."""
    one = dataclasses.replace(
        SUM, dtype="bfloat16", direction=Phase.OPTIMIZER, agreed=size, bytes=size
    )
    assert [each.expected for each in ledger(rank(one), rank(one)).findings] == expected


def test_a_rank_that_failed() -> None:
    """Its collectives are not known, so nothing is said about agreement."""
    found = ledger(rank(SUM), RankLedger(error="broken"))
    assert (found.findings, found.recorded) == ((), False)
    assert found.collectives


def test_names_and_places_are_completed() -> None:
    """A group without a name gets one; a call outside of Megatron is at its module's code."""
    code = Sources({"decoder": 0}, (ModuleCode("megatron/core/b.py:2 (Block.forward)"),))
    one = dataclasses.replace(SUM, group="", where="")
    found = ledger(dataclasses.replace(rank(one), sources=code), rank(one))
    (collective,) = found.collectives
    assert collective.group == "ranks"
    assert collective.where == "megatron/core/b.py:2 (Block.forward)"
    assert found.sources == code


def test_what_ranks_know_of_their_functions() -> None:
    """Numbers, functions with lines of their own, and what reports a metric, each once.

    Marks that not all ranks set on a parameter are partial, unless one rank alone has it.
    """
    marks = {"w": ("shared",), "v": ("allreduce",)}, {"w": ("shared", "x"), "u": ("x",)}, {"w": ()}
    numbers = [{"f": {"tokens": (value, 2.0), "": (1.0,)}} for value in (4.0, 3.0, 3.0)]
    apart, metrics = (("f",), ("f", "g"), ()), ({}, {}, {"z_loss": "log.py:1 (log)"})
    found = ledger(
        *(
            RankLedger(
                numbers=numbers[n],
                apart=apart[n],
                sources=Sources(metrics=metrics[n], calls=Calls(marks=marks[n])),
            )
            for n in range(3)
        )
    )
    assert found.numbers == {"f": {"tokens": (2.0, 3.0, 4.0), "": (1.0,)}}
    assert found.apart == ("f", "g")
    assert found.sources.metrics == metrics[2]
    assert found.sources.calls.partial == {"w": ("shared", "x")}


@pytest.mark.parametrize(
    ("shards", "torn"),
    [
        ([(0, 4), (4, 6)], False),
        # Of two tensor-parallel ranks.
        ([(0, 4), (4, 6), (4, 6), (0, 4)], False),
        ([(0, 3), (4, 6)], True),
        ([(0, 4), (3, 6)], True),
        ([(0, 4), (4, 7)], True),
        ([], True),
    ],
)
def test_shards_of_a_parameter(shards: list[tuple[int, int]], torn: bool) -> None:
    """They have all elements equally often; what no record has is not known."""
    sources = Sources(calls=Calls(buckets={"w": "0"}))
    own = [{"w": Shard(*shard, 6)} for shard in shards]
    ranks = [RankLedger(sources=sources, shards=each) for each in (*own, {})]
    assert ledger(*ranks).torn == ("w",) * torn
    assert ledger(*ranks, RankLedger(error="broken")).torn == ()


def test_json() -> None:
    """A ledger is the same after a round trip."""
    found = ledger(rank(SUM), rank())
    assert found.findings
    assert Ledger.from_json(found.to_json()) == found


CALLED = st.builds(
    lambda group, **changes: dataclasses.replace(
        SUM,
        group=group,
        members={"tp": (0, 1), "pp": (2, 3), "": (0, 1, 2, 3)}[group],
        communicator=group,
        **changes,
    ),
    st.sampled_from(["tp", "pp", ""]),
    operation=st.sampled_from([Operation.ALL_REDUCE, Operation.ALL_TO_ALL]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    bytes=st.sampled_from([64, 32]),
    direction=st.sampled_from([Phase.FORWARD, Phase.GRADIENTS]),
    where=st.sampled_from(["", "a.py:1 (f)"]),
    count=st.integers(1, 2),
)
MESSAGES = st.builds(
    lambda operation, peer, bytes_: dataclasses.replace(
        SUM,
        operation=operation,
        group="world",
        members=(0, 1, 2, 3),
        communicator="0",
        agreed=-1,
        peer=peer,
        bytes=bytes_,
    ),
    st.sampled_from([Operation.SEND, Operation.RECV]),
    st.integers(-1, 3),
    st.integers(1, 2),
)
LEDGERS = st.builds(
    lambda called, order, code: dataclasses.replace(rank(*called, order=order), sources=code),
    st.lists(CALLED | MESSAGES, max_size=4),
    st.sampled_from("ab"),
    st.sampled_from([Sources(), Sources({SUM.module: 0}, (ModuleCode("b.py:2 (g)"),))]),
)


@given(st.lists(LEDGERS, min_size=1, max_size=3), st.lists(st.integers(0, 9), max_size=4))
def test_ledgers_that_were_merged_on_their_way(kinds: list[RankLedger], chosen: list[int]) -> None:
    """What ranks have in common, and is one object at the end, is judged as if each had its own."""
    ranks = [kinds[number % len(kinds)] for number in (*chosen, *range(4 - len(chosen)))]
    messages = [folded.fold({number: one.to_json()}) for number, one in enumerate(ranks)]
    first = json.loads(json.dumps(folded.merge(messages[:2])))
    arrived = folded.unfold(folded.merge([first, folded.merge(messages[2:])]))
    once = folded.Once()
    together = [recording.decoded(message, once) for message in arrived.values()]
    alone = [RankLedger.from_json(json.loads(json.dumps(one.to_json()))) for one in ranks]
    assert together == alone == ranks
    assert ledger(*together) == ledger(*alone)
    assert len({id(one.calls) for one in together}) == len({one.calls for one in together})
