# SPDX-License-Identifier: Apache-2.0
"""Shards of several ranks become one device's trace; ranks that disagree are noticed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare.measure import measure, relative_error
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.run import channel, merging
from megatron_ttrace.saved.whole import Shards
from megatron_ttrace.trace import counted
from megatron_ttrace.trace.counted import Counted, Counting, Part, Statistic, Sum, Term
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter
from tests.run import kept

ROWS, COLUMNS = 4, 6


def half(rank, data, key=kept.OUTPUT, **more):
    """A rank's half of a tensor's rows."""
    box = Box((rank * 2, 0), (2, COLUMNS), (0, 0))
    return Entry.of(key, data, logical_shape=(ROWS, COLUMNS), boxes=(box,), **more), data


def whole(data):
    """A tensor that a rank has completely."""
    origin, shape = (0,) * data.dim(), tuple(data.shape)
    box = Box(origin, shape, origin)
    return Entry.of(kept.OUTPUT, data, logical_shape=shape, boxes=(box,)), data


def write(home, ranks):
    """The shards of ranks, each a list of entries with their data."""
    for rank, tensors in enumerate(ranks):
        writer = TraceWriter(home, rank)
        for entry, data in tensors:
            writer.add(entry, None if entry.same_as >= 0 else data)
        writer.close()


def merge(tmp_path, ranks, stages=(0, 0)):
    """The merged trace."""
    write(tmp_path / "shards", ranks)
    writer = TraceWriter(tmp_path / "whole", 0)
    merging.merge(tmp_path / "shards", stages, writer)
    writer.close()
    return TraceReader(tmp_path / "whole", sealed=False)


def test_parts_and_names(tmp_path):
    """Whole tensors; a second name of all parts is a second name of the whole."""
    original = kept.tensors()[kept.OUTPUT]
    second_name = TraceKey(1, 0, Kind.INPUT, "decoder.layers.1")
    ranks = [
        [half(rank, data), half(rank, data, second_name, same_as=0)]
        for rank, data in enumerate((original[:2].clone(), original[2:].clone()))
    ]
    merged = merge(tmp_path, ranks)
    assert torch.equal(merged.tensor(merged.entry(kept.OUTPUT)), original)
    assert merged.primary(second_name) == kept.OUTPUT
    assert merged.entry(second_name).shape == merged.entry(kept.OUTPUT).shape == (ROWS, COLUMNS)


def test_replicas_that_differ_in_a_bit(tmp_path):
    """The tensor and a rank are named."""
    data = torch.ones(2, COLUMNS)
    changed = data.clone()
    changed[1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    with pytest.raises(TTraceError, match=r"ranks 1 differ from other ranks in decoder\.layers"):
        merge(tmp_path, [[whole(replica)] for replica in (data, changed)])


def test_replicas_that_are_equal(tmp_path):
    """NaN equals itself, and -0.0 does not equal 0.0."""
    data = torch.tensor([math.nan, -0.0])
    write(tmp_path, [[whole(replica)] for replica in (data, data.clone())])
    shards = Shards(TraceReader(tmp_path, sealed=False))
    assert shards.conflicting(kept.OUTPUT, data) == []
    assert shards.conflicting(kept.OUTPUT, torch.tensor([math.nan, 0.0])) == [0, 1]


def test_a_part_that_no_rank_has(tmp_path):
    """It is refused."""
    with pytest.raises(TTraceError, match="lack a part of decoder"):
        merge(tmp_path, [[half(0, torch.ones(2, COLUMNS))]])


def test_order_of_a_pipeline(tmp_path):
    """As one device runs: stage by stage forward, backward in the other direction."""

    def step(stage):
        keys = [
            TraceKey(1, STEP_LEVEL, Kind.PARAM, f"weight{stage}"),
            *(
                TraceKey(1, microbatch, kind, f"module{stage}")
                for kind in (Kind.OUTPUT, Kind.GRAD_INPUT)
                for microbatch in (0, 1)
            ),
            TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, f"weight{stage}"),
            TraceKey(1, STEP_LEVEL, Kind.PARAM, f"weight{stage}", 1),
        ]
        data = torch.zeros(())
        return [(Entry.of(key, data), data) for key in keys]

    write(tmp_path, [step(0), step(1)])
    keys = merging.in_order(Shards(TraceReader(tmp_path, sealed=False)), [0, 1])
    assert [(key.microbatch, key.kind, key.name[-1], key.index) for key in keys] == [
        (-1, Kind.PARAM, "0", 0),
        (-1, Kind.PARAM, "1", 0),
        (0, Kind.OUTPUT, "0", 0),
        (0, Kind.OUTPUT, "1", 0),
        (0, Kind.GRAD_INPUT, "1", 0),
        (0, Kind.GRAD_INPUT, "0", 0),
        (1, Kind.OUTPUT, "0", 0),
        (1, Kind.OUTPUT, "1", 0),
        (1, Kind.GRAD_INPUT, "1", 0),
        (1, Kind.GRAD_INPUT, "0", 0),
        (-1, Kind.MAIN_GRAD, "0", 0),
        (-1, Kind.MAIN_GRAD, "1", 0),
        (-1, Kind.PARAM, "0", 1),
        (-1, Kind.PARAM, "1", 1),
    ]


def test_counts():
    """Parameters of all ranks are counted, each once; the record can be read again."""
    norm = Counting(
        Statistic.GRAD_NORM, made=(Sum(((0, 1, 1),), 0, parts=(Term(0), Term(1))),), sums=(Term(0),)
    )

    def of_rank(*names):
        parts = tuple(Part(name, (2,), (Box((0,), (2,), (0,)),)) for name in names)
        return [Counted(1, parts, (0, 1), (norm,))]

    (merged,) = merging.merged([of_rank("a", "shared"), of_rank("shared", "b")])
    assert [part.name for part in merged.parts] == ["a", "shared", "b"]
    assert merged.held == (0, 1, 2)
    assert [counting.parts for counting in merged.countings] == [
        (Term(0), Term(1)),
        (Term(1), Term(2)),
    ]
    assert counted.decode(counted.encode([merged])) == (merged,)


@given(st.integers(0, ROWS), st.floats(1e-6, 1e-2), st.booleans())
def test_a_movement_is_that_of_the_whole(cut, size, replicated):
    """However a tensor is divided, and however often each part is held."""
    original = kept.tensors(1)[kept.OUTPUT]
    replay = original + size * kept.tensors(2)[kept.OUTPUT]
    movements = []
    for start, end in ((0, cut), (cut, ROWS)):
        box = Box((start, 0), (end - start, COLUMNS), (0, 0))
        sums = measure(replay[start:end], original, (box,))
        movement = merging.movement([Measured(kept.OUTPUT, "", (box,), (ROWS, COLUMNS), sums)])
        movements += [movement, movement] if replicated else [movement]
    message = channel.unpacked(channel.packed(merging.joined(movements)), 0)
    (moved,) = merging.moved(merging.joined([message]), {}).values()
    box = Box((0, 0), (ROWS, COLUMNS), (0, 0))
    sums = measure(replay, original, (box,))
    assert moved.n == sums.n
    assert moved.norm == pytest.approx(math.sqrt(sums.reference))
    assert moved.moved == pytest.approx((relative_error(sums, 0.0),))


def test_a_tensor_that_changed_its_shape():
    """A replay that cannot be compared makes the tensor blind."""
    lost = Measured.misfit(kept.OUTPUT, (1,), "no part of it")
    first = merging.moved(merging.movement([lost]), {})
    again = merging.moved(merging.movement([lost]), first)
    assert again[kept.OUTPUT].moved == (math.inf, math.inf)
