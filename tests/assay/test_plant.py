# SPDX-License-Identifier: Apache-2.0
"""Errors planted into a saved run of two ranks, made by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind, Outcome, TraceKey
from megatron_ttrace.trace.store import seal
from tests.assay import __main__, harness
from tests.assay.plant import SHAPES, WHOLE_SIZE, Field, attempt, kinds, random_box
from tests.assay.small_run import save
from tests.compare.traces import step_level

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
    moved = {place: 0.5 if place == BLIND else 0.003 for place in known}
    double = {GRAD: 2}
    save(
        home,
        known,
        moved,
        part_of=lambda place, part, rank: part * double.get(place, 1),
        config={"layers": 1},
    )
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


def test_every_kind_is_planted_and_reproducible(field):
    """Shapes times sizes, then those with a size of their own."""
    rows = [attempt(3, 1, kind) for kind in kinds(field)]
    assert rows == [attempt(3, 1, kind) for kind in kinds(field)]
    assert {row.id.partition(",")[0] for row in rows} == {*SHAPES, *WHOLE_SIZE}
    assert all(row.details["found"] == 1 for row in rows if not row.details["size"] < 2)
    assert all(row.details["found"] == 0 for row in rows if row.details["size"] == 0.5)


def test_a_random_box_is_a_view():
    """Of any part, a scalar included."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.zeros(5, 3)
    for _ in range(20):
        random_box(whole, generator).add_(1.0)
    assert 0 < float(whole.min() + whole.max()) <= 40
    assert random_box(torch.tensor(1.0), generator).shape == ()


def test_the_command(saved, tmp_path, capsys):
    """A row for each kind, exit code 0 when the bars are met."""
    words = ["plant", *map(str, saved), "--directory", str(tmp_path), "--trials"]
    assert __main__.main([*words, "5"]) == 0
    assert "6 places" in capsys.readouterr().out
    _, rows = harness.load(tmp_path / "rows.jsonl")
    assert {row.id.partition(",")[0] for row in rows} == {*SHAPES, *WHOLE_SIZE}
    assert __main__.main([*words, "0"]) == 2


def test_help(capsys):
    """Every command explains itself."""
    parser = __main__.build_parser()
    (commands,) = (action.choices for action in parser._actions if action.choices)
    assert len(commands) == 11
    for command in commands.values():
        assert "exit" in command.format_help() or "example" in command.format_help(), command.prog


def test_a_trace_of_failed_tensors_is_not_enough(saved, tmp_path):
    """One clear line."""
    seal(tmp_path, {"role": "candidate", "complete": False})
    with pytest.raises(TTraceError, match="failed tensors only"):
        Field(saved[0], tmp_path)
