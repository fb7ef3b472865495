# SPDX-License-Identifier: Apache-2.0
"""Errors planted into a saved run of two ranks, made by hand."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.tolerance import Moved, write
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind, Outcome, TraceKey
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.assay import __main__
from tests.assay.planting import SHAPES, WHOLE_SIZE, Field, random_box, sweep
from tests.compare.traces import step_level
from tests.placement.meshes import mesh_of

OUT = (0, Kind.OUTPUT, "decoder.layers.0", 0)
GRAD = (0, Kind.GRAD_OUTPUT, "decoder.layers.0", 0)
WEIGHT = step_level(Kind.MAIN_GRAD, "w")
START = step_level(Kind.PARAM, "w")
BLIND = (0, Kind.OUTPUT, "blind", 0)
ZERO = (0, Kind.OUTPUT, "zero", 0)


def tensors():
    """A reference of one step."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(8, 6, generator=generator)
    return {
        OUT: torch.randn(16, 2, 6, generator=generator),
        GRAD: torch.randn(16, 2, 6, generator=generator).bfloat16(),
        WEIGHT: weight,
        START: weight,
        BLIND: torch.randn(16, 2, generator=generator),
        ZERO: torch.zeros(16, 2),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of a reference and of a candidate on two tensor-parallel ranks."""
    home = tmp_path_factory.mktemp("saved")
    known = tensors()
    writer = TraceWriter(home / "reference", 0)
    sink = WriteSink(writer, 1)
    for place, data in known.items():
        sink.tensor((place,), data)
    writer.close()
    write(
        home / "reference",
        {
            TraceKey(1, *place): Moved(
                data.numel(), float(data.double().norm()), (0.5 if place == BLIND else 0.003,)
            )
            for place, data in known.items()
        },
    )
    seal(home / "reference", {"role": "reference", "epsilon": 2.0**-7})
    reference = TraceReader(home / "reference")
    for rank in range(2):
        writer = TraceWriter(home / "candidate", rank)
        layout = RankLayout(mesh_of(rank, 2, tp=2), 16, False, 2.0)
        sink = CompareSink(reference, 1, layout, writer=writer, keep_all=True)
        for place, data in known.items():
            if place in (WEIGHT, START):
                part = data.chunk(2)[rank].clone()
                sink.placed(place, part, data.shape, (Step("tp", Shard(0)),))
            else:
                sink.tensor((place,), data.chunk(2)[rank] * (2 if place == GRAD else 1))
        writer.close()
    seal(home / "candidate", {"role": "candidate", "complete": True, "config": {"layers": 1}})
    return home / "reference", home / "candidate"


@pytest.fixture(scope="module")
def field(saved):
    """The saved run."""
    return Field(*saved)


def test_nothing_is_planted_where_sizes_mean_nothing(field):
    """Exact, blind and all-zero tensors have no unit; the others one on each rank."""
    assert len(field) == 2 * len((OUT, GRAD, WEIGHT))
    for place in (OUT, GRAD, WEIGHT, START, ZERO):
        assert field.verdict(TraceKey(1, *place)).verdict is Outcome.PASS
    assert field.verdict(TraceKey(1, *BLIND)).verdict is Outcome.UNCHECKED


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.floats(2.0, 1e4),
    st.integers(0, 2**31),
)
def test_from_two_tolerances_every_error_is_found(field, shape, size, seed):
    """Whatever its shape and place, and on the right rank."""
    trial = field.plant(shape, size, torch.Generator().manual_seed(seed))
    assert trial.found
    assert trial.right_rank
    assert trial.margin == pytest.approx(size, rel=0.2)


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.floats(0.0, 0.5),
    st.integers(0, 2**31),
)
def test_up_to_half_a_tolerance_no_error_is_flagged(field, shape, size, seed):
    """Rounding of that size is what the tolerance is for."""
    trial = field.plant(shape, size, torch.Generator().manual_seed(seed))
    assert not trial.found
    assert trial.margin < 0.75


def test_a_sweep_has_every_sort_and_is_reproducible(field):
    """Shapes times sizes, then those with a size of their own."""
    first = sweep(field, (0.5, 2.0), 3)
    assert len(first) == 2 * len(SHAPES) + len(WHOLE_SIZE)
    assert all(len(trials) == 3 for trials in first.values())
    again = sweep(field, (0.5, 2.0), 3)
    assert [t.key for ts in first.values() for t in ts] == [
        t.key for ts in again.values() for t in ts
    ]
    assert all(t.found for (_, size), ts in first.items() if math.isnan(size) for t in ts)


def test_a_random_box_is_a_view():
    """Of any part, a scalar included."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.zeros(5, 3)
    for _ in range(20):
        random_box(whole, generator).add_(1.0)
    assert 0 < float(whole.min() + whole.max()) <= 40
    assert random_box(torch.tensor(1.0), generator).shape == ()


def test_the_command(saved, capsys):
    """Rows as JSON, exit code 0 when the bars are met, and one line on a trace that is none."""
    assert __main__.main(["plant", *map(str, saved), "--trials", "5", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["shape"] for row in rows} == {*SHAPES, *WHOLE_SIZE}
    assert all(row["found"] == 1.0 for row in rows if row["size"] is None or row["size"] >= 2)
    assert __main__.main(["plant", *map(str, saved), "--trials", "5"]) == 0
    assert "right rank" in capsys.readouterr().out
    assert __main__.main(["plant", *map(str, saved), "--trials", "0"]) == 2


def test_a_trace_of_failed_tensors_is_not_enough(saved, tmp_path):
    """One clear line."""
    seal(tmp_path, {"role": "candidate", "complete": False})
    with pytest.raises(TTraceError, match="failed tensors only"):
        Field(saved[0], tmp_path)
