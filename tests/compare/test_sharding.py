# SPDX-License-Identifier: Apache-2.0
"""A reference's rank writes its shards with the places that the trial of its layout showed."""

from contextlib import nullcontext

import pytest
import torch

from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sharding import ShardSink, divided, known
from megatron_ttrace.jobs import reference_layout
from megatron_ttrace.jobs.reference_layout import Layout
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal
from tests.placement.meshes import mesh_of

FC1 = "decoder.layers.{}.mlp.linear_fc1"
OUTPUT = (0, Kind.OUTPUT, FC1.format(7), 0)


def trial(directory, *shapes):
    """A small candidate's outputs, one layer each: (local, logical) shapes."""
    writer = TraceWriter(directory, 0)
    for layer, (local, whole) in enumerate(shapes):
        data = torch.zeros(local)
        key = TraceKey(1, 0, Kind.OUTPUT, FC1.format(layer))
        writer.add(Entry.of(key, data, logical_shape=whole), data)
    data = torch.zeros(2)
    writer.add(Entry.of(TraceKey(1, STEP_LEVEL, Kind.PARAM, "weight"), data), data)
    writer.add(Entry.of(TraceKey(1, 0, Kind.TOKENS, "tokens"), data), data)
    writer.close()
    return TraceReader(directory, sealed=False)


def test_layers_are_divided_alike(tmp_path):
    """The layer's number does not matter; parameters and tokens need no such knowledge."""
    found = divided(trial(tmp_path, ((4, 2, 8), (4, 2, 16)), ((4, 2, 8), (4, 2, 16))))
    assert found == ((Kind.OUTPUT, FC1.format("*"), 0, (1, 1, 2)),)


@pytest.mark.parametrize(
    ("columns", "why"),
    [((16, 8), "divide this tensor differently"), ((15,), "parts of different sizes")],
)
def test_layers_that_are_divided_differently(tmp_path, columns, why):
    """Then nothing can be said of another layer, or of a larger tensor."""
    with pytest.raises(TTraceError, match=why):
        divided(trial(tmp_path, *(((4, 2, 8), (4, 2, size)) for size in columns)))


@pytest.fixture
def sink(tmp_path):
    """Of the second of two tensor-parallel ranks; with it, what it has written."""
    by = known(divided(trial(tmp_path / "trial", ((4, 2, 8), (4, 2, 16)))))
    layout = RankLayout(mesh_of(1, 2, tp=2), 16, 1.0)
    writer = TraceWriter(tmp_path / "shards", 1)

    def written():
        writer.close()
        return TraceReader(tmp_path / "shards", sealed=False)

    return ShardSink(writer, 1, layout, by, lambda index: index), written


def test_an_activation(sink):
    """Its place is that of the larger tensor; other names point at it."""
    shards, written = sink
    data = torch.randn(16, 1, 100)
    shards.tensor((OUTPUT, (1, *OUTPUT[1:])), data)
    reader = written()
    first, second = reader.ranks[1]
    assert first.logical_shape == second.logical_shape == (16, 1, 200)
    assert first.boxes == (Box((0, 0, 100), (16, 1, 100), (0, 0, 0)),)
    assert second.same_as == 0
    assert torch.equal(reader.tensor(first), data)


def test_a_parameter(sink):
    shards, written = sink
    where = (STEP_LEVEL, Kind.PARAM, "weight", 0)
    shards.placed(where, torch.ones(3, 5), (6, 5), (Step("tp", Shard(0)),))
    (entry,) = written().ranks[1]
    assert entry.boxes == (Box((3, 0), (3, 5), (0, 0)),)


@pytest.mark.parametrize(
    ("place", "shape"), [((0, Kind.OUTPUT, "decoder", 0), (2, 2, 2)), (OUTPUT, (2, 2))]
)
def test_a_tensor_that_the_trial_did_not_have(sink, place, shape):
    """It is refused, not guessed."""
    with pytest.raises(TTraceError, match=r"the shrunk job .* has no such tensor"):
        sink[0].tensor((place,), torch.zeros(shape))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [(None, None), ({"tp": 2, "pp": 1, "cp": 1}, Layout(tp=2)), ("tp=2", ""), ({"tp": "2"}, "")],
)
def test_the_layout_in_a_trace(tmp_path, layout, expected):
    """One device has none; what is no layout is damage."""
    seal(tmp_path, {"role": "reference", "layout": layout})
    fails = pytest.raises(TTraceError, match="is damaged") if expected == "" else nullcontext()
    with fails:
        assert reference_layout.decoded(TraceReader(tmp_path).reference.layout) == expected
