# SPDX-License-Identifier: Apache-2.0
"""Statistics of merged tensors, against numpy and against torch.testing itself."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.assay.baselines.statistics import of_saved, statistics
from tests.placement.meshes import mesh_of

OUT = (0, Kind.OUTPUT, "decoder.layers.0", 0)
GRAD = (0, Kind.GRAD_OUTPUT, "decoder.layers.0", 0)
IDS = (0, Kind.TOKENS, "tokens", 0)


def test_against_numpy():
    """Every field."""
    generator = torch.Generator().manual_seed(1)
    r = torch.randn(7, 5, generator=generator)
    c = r + 0.1 * torch.randn(7, 5, generator=generator)
    found = statistics(c, r)
    c, r = c.double().numpy(), r.double().numpy()
    assert found.n == 35
    assert found.diff == pytest.approx(((c - r) ** 2).sum())
    assert found.reference == pytest.approx((r**2).sum())
    assert found.candidate == pytest.approx((c**2).sum())
    assert found.extremes == pytest.approx((c.max(), c.min(), c.mean()))
    assert found.reference_extremes == pytest.approx((r.max(), r.min(), r.mean()))
    assert found.relative_error == pytest.approx(np.linalg.norm(c - r) / np.linalg.norm(r))


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.floats(-12, 0),
    st.integers(0, 999),
)
def test_far_elements_are_those_that_torch_refuses(dtype, size, seed):
    """For every dtype and size of error."""
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(20, generator=generator).to(dtype)
    noise = torch.randn(20, generator=generator).double()
    c = (r.double() * (1 + 10.0**size * noise)).to(dtype)
    try:
        torch.testing.assert_close(c, r)
        refused = False
    except AssertionError:
        refused = True
    assert (statistics(c, r).far > 0) == refused


def test_nan_counts_where_the_reference_is_a_number():
    """It does not spoil the other numbers."""
    found = statistics(torch.tensor([math.nan, 2.0, math.inf]), torch.tensor([1.0, 1.0, math.inf]))
    assert (found.nonfinite, found.n, found.diff) == (1, 1, 1.0)
    assert statistics(torch.tensor([math.nan]), torch.tensor([1.0])).n == 0
    assert statistics(torch.zeros(3), torch.zeros(3)).relative_error == 0.0
    assert statistics(torch.ones(3), torch.zeros(3)).relative_error == math.inf


def test_shards_are_put_together_and_the_worst_replica_counts(tmp_path):
    """Two tensor-parallel ranks times two replicas; gradients are divided by their factor."""
    r = torch.arange(24.0).reshape(12, 2)
    writer = TraceWriter(tmp_path / "r", 0)
    sink = WriteSink(writer, 1)
    for place, data in ((OUT, r), (GRAD, r), (IDS, torch.arange(4))):
        sink.placed(place, data, data.shape, ())
    writer.close()
    seal(tmp_path / "r", {})
    reference = TraceReader(tmp_path / "r")
    for rank in range(4):
        writer = TraceWriter(tmp_path / "c", rank)
        layout = RankLayout(mesh_of(rank, 4, tp=2), 12, False, 2.0)
        sink = CompareSink(reference, 1, layout, writer=writer, keep_all=True)
        half = r.chunk(2)[rank % 2].clone()
        sink.tensor((GRAD,), 2 * half)
        half[0] += 1.0 if rank == 3 else 0.0
        sink.tensor((OUT,), half)
        sink.placed(IDS, torch.arange(4), (4,), ())
        writer.close()
    seal(tmp_path / "c", {})
    found = dict(of_saved(reference, TraceReader(tmp_path / "c")))
    assert set(found) == {TraceKey(1, *OUT), TraceKey(1, *GRAD)}
    assert found[TraceKey(1, *GRAD)].diff == 0.0
    assert found[TraceKey(1, *OUT)].diff == 2.0
    assert found[TraceKey(1, *OUT)].n == 24
