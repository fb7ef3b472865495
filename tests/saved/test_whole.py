# SPDX-License-Identifier: Apache-2.0
"""Shards that were saved are the whole tensor again."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.saved.whole import WholeTensors
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal
from tests.placement.meshes import mesh_of
from tests.run import kept

KEY = kept.OUTPUT


def saved(home: Path, shards: list[Entry], data: list[torch.Tensor], **config: object):
    """A candidate whose ranks hold one shard each."""
    for rank, (entry, local) in enumerate(zip(shards, data, strict=True)):
        writer = TraceWriter(home, rank)
        writer.add(entry, local)
        writer.close()
    meshes = [dataclasses.asdict(mesh_of(r, len(data), tp=len(data))) for r in range(len(data))]
    seal(home, {"role": "candidate", "meshes": meshes, "config": RunConfig(**config).to_json()})
    return WholeTensors(TraceReader(home))


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5), st.sampled_from([1.0, 2.0, 4.0]))
def test_two_parts_along_a_dim(tmp_path_factory, rows, columns, cut, factor):
    """However they are cut, and whatever power of two the run's gradients are multiplied by."""
    cut = min(cut, rows)
    whole = torch.randn(rows, columns)
    shards, data = [], []
    for start, end in ((0, cut), (cut, rows)):
        local = whole[start:end] * factor
        box = Box((start, 0), (end - start, columns), (0, 0))
        more = {"logical_shape": (rows, columns), "boxes": (box,), "factor": factor}
        shards.append(Entry.of(KEY, local, **more))
        data.append(local)
    tensors = saved(tmp_path_factory.mktemp("whole"), shards, data)
    assert torch.equal(tensors.tensor(KEY), whole)


@pytest.mark.parametrize("axis", ["", "tp"])
def test_terms_of_a_sum(tmp_path, axis):
    """Partial tensors are added up; of replicas the first rank's counts."""
    terms = [torch.full((2, 2), 3.0), torch.full((2, 2), 4.0)]
    box = Box((0, 0), (2, 2), (0, 0))
    more = {"logical_shape": (2, 2), "boxes": (box,), "partial_over": axis}
    tensors = saved(tmp_path, [Entry.of(KEY, term, **more) for term in terms], terms)
    assert torch.equal(tensors.tensor(KEY), torch.full((2, 2), 7.0 if axis else 3.0))


def test_a_part_that_nobody_holds(tmp_path):
    """There is no whole tensor."""
    local = torch.ones(1, 2)
    box = Box((0, 0), (1, 2), (0, 0))
    shard = Entry.of(KEY, local, logical_shape=(2, 2), boxes=(box,))
    assert saved(tmp_path, [shard, shard], [local, local]).tensor(KEY) is None


def test_what_depends_on_the_layout(tmp_path):
    """A part of a matrix that is updated by looking at the whole part is no one else's."""
    key = TraceKey(1, -1, Kind.PARAM_DELTA, "a.weight")
    local = torch.ones(1, 2)
    boxes = [Box((row, 0), (1, 2), (0, 0)) for row in (0, 1)]
    shards = [Entry.of(key, local, logical_shape=(2, 2), boxes=(box,)) for box in boxes]
    tensors = saved(tmp_path, shards, [local, local], own_shards=(Kind.PARAM_DELTA,))
    assert tensors.unjudged(key) is Reason.OWN_SHARD
