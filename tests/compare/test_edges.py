# SPDX-License-Identifier: Apache-2.0
"""Awkward tensors from one end to the other: written, measured offline or in place, judged."""

import math

import pytest
import torch

from megatron_ttrace.compare.gathered import of_rank, of_ranks
from megatron_ttrace.compare.judge import judge
from megatron_ttrace.compare.offline import measure_saved
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.tolerance import Moved, Tolerances
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.report.wording import notes_text
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, TraceKey
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal

nan, inf = math.nan, math.inf
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOVED = 0.005
"""Every replay moved every tensor so far: tolerance 0.02."""


def normal(*shape, dtype=torch.float32, seed=0):
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def verdict_on(directory, reference, candidate, kind=Kind.OUTPUT):
    """The verdict on one tensor of one rank; in place and offline must agree."""
    place = (STEP_LEVEL if kind is Kind.MAIN_GRAD else 0, kind, "decoder.layers.0", 0)
    writer = TraceWriter(directory / "reference", 0)
    WriteSink(writer, 1).placed(place, reference, reference.shape, ())
    writer.close()
    seal(directory / "reference", {})
    reader = TraceReader(directory / "reference")
    saving = TraceWriter(directory / "candidate", 0)
    layout = RankLayout(SINGLE, 16, False, 1.0)
    sink = CompareSink(reader, 1, layout, writer=saving, keep_all=True)
    sink.placed(place, candidate, candidate.shape, ())
    saving.close()
    seal(directory / "candidate", {})
    offline = measure_saved(reader, TraceReader(directory / "candidate"))

    key = TraceKey(1, *place)
    finite = torch.nan_to_num(reference.double(), 0.0, 0.0, 0.0)
    moves = (MOVED if reference.numel() else 0.0,) * 4
    moved = Moved(reference.numel(), float(finite.norm()), moves)
    tolerances = Tolerances({key: moved}, {key: str(reference.dtype)})
    shapes = [(key, tuple(reference.shape))]
    [verdict] = judge(shapes, of_rank(0, sink.measured), tolerances, 2.0**-7)
    [again] = judge(shapes, of_ranks(offline), tolerances, 2.0**-7)
    assert again.verdict is verdict.verdict
    if verdict.rel_err is not None:
        assert again.rel_err == pytest.approx(verdict.rel_err, rel=1e-5)
    return verdict


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (400,), (7, 11, 5)], ids=str)
def test_every_float(tmp_path, dtype, shape):
    """Equal passes, three tolerances off diverges, whatever the number of elements."""
    r = normal(400, dtype=dtype)[: math.prod(shape)].reshape(shape) + 1
    scale = 200 if r.numel() == 1 else 1  # few samples, wider tolerance
    assert verdict_on(tmp_path / "a", r, r.clone()).verdict is Outcome.PASS
    wrong = (r.double() * (1 + 0.06 * scale)).to(dtype)
    assert verdict_on(tmp_path / "b", r, wrong).verdict is Outcome.DIVERGED


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8(tmp_path, dtype):
    """A tensor in FP8 is measured as numbers, and one element off is off."""
    r = normal(16, 16, dtype=dtype)
    assert verdict_on(tmp_path / "a", r, r.clone()).verdict is Outcome.PASS
    wrong = r.float()
    wrong[3] *= 2
    assert verdict_on(tmp_path / "b", r, wrong.to(dtype)).verdict is Outcome.DIVERGED


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_no_number_on_one_side(tmp_path, dtype, value):
    """One element among many, in either run."""
    r, c = normal(40, dtype=dtype), normal(40, dtype=dtype)
    c[7] = value
    assert verdict_on(tmp_path / "a", r, c).verdict is Outcome.NONFINITE
    assert verdict_on(tmp_path / "b", c, r).verdict is Outcome.NONFINITE


@pytest.mark.parametrize("value", [inf, -inf])
def test_equal_infinities_pass(tmp_path, value):
    """A mask of minus infinities is a value like others; what is beside it counts."""
    r = normal(40)
    r[7] = value
    assert verdict_on(tmp_path / "a", r, r.clone()).verdict is Outcome.PASS
    c = r.clone()
    c[8] += 1.0
    assert verdict_on(tmp_path / "b", r, c).verdict is Outcome.DIVERGED


def test_nan_in_both_runs_is_no_evidence(tmp_path):
    """Nothing to compare with: unchecked, and a difference beside it is still one."""
    r = torch.full((40,), nan)
    verdict = verdict_on(tmp_path / "a", r, r.clone())
    assert verdict.verdict is Outcome.UNCHECKED
    assert notes_text(verdict.notes) == "undefined: 40 elements are NaN in both runs"
    r = normal(40)
    r[7] = nan
    assert verdict_on(tmp_path / "b", r, r.clone()).verdict is Outcome.UNCHECKED
    c = r.clone()
    c[8] += 1.0
    assert verdict_on(tmp_path / "c", r, c).verdict is Outcome.DIVERGED


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_zero(tmp_path, dtype):
    """Zero equals zero, with any sign; nothing else does."""
    zero, r = torch.zeros(40, dtype=dtype), normal(40, dtype=dtype)
    assert verdict_on(tmp_path / "a", zero, zero.clone()).verdict is Outcome.PASS
    assert verdict_on(tmp_path / "b", zero, -zero).verdict is Outcome.PASS
    assert verdict_on(tmp_path / "c", r, zero).verdict is Outcome.DIVERGED
    small = zero.clone()
    small[3] = max(torch.finfo(dtype).tiny, torch.finfo(torch.float32).tiny)
    wrong = verdict_on(tmp_path / "d", zero, small)
    assert wrong.verdict is Outcome.DIVERGED
    assert wrong.rel_err == inf


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)], ids=str)
def test_empty(tmp_path, shape):
    """Nothing differs from nothing; an expert that got no token has such tensors."""
    r = torch.zeros(shape)
    verdict = verdict_on(tmp_path, r, r.clone())
    assert (verdict.verdict, verdict.margin) == (Outcome.PASS, 0.0)


def test_not_contiguous(tmp_path):
    """Transposed, strided and expanded tensors are compared by index, not by memory."""
    r = normal(12, 8)
    assert verdict_on(tmp_path / "a", r, r.t().contiguous().t()).verdict is Outcome.PASS
    wide = torch.zeros(12, 16)
    wide[:, ::2] = r
    assert verdict_on(tmp_path / "b", r, wide[:, ::2]).verdict is Outcome.PASS
    row = normal(1, 8).expand(12, 8)
    assert verdict_on(tmp_path / "c", row, row).verdict is Outcome.PASS
    assert verdict_on(tmp_path / "d", r, r.flip(0)).verdict is Outcome.DIVERGED
    square = normal(9, 9)
    assert verdict_on(tmp_path / "e", square, square.t()).verdict is Outcome.DIVERGED


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_discrete(tmp_path, dtype):
    """Equal or wrong: one in a thousand is wrong, whatever the replays did."""
    r = torch.arange(1000).remainder(2).to(dtype)
    c = r.clone()
    c[500] = 1 - int(r[500])
    assert verdict_on(tmp_path / "a", r, r.clone()).verdict is Outcome.PASS
    assert verdict_on(tmp_path / "b", r, c).verdict is Outcome.DIVERGED


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
def test_numbers_whose_squares_are_no_float32(tmp_path, scale):
    """Second moments and overflowing activations."""
    r = normal(400).clamp(-2, 2) * scale
    assert verdict_on(tmp_path / "a", r, r * (1 + 1e-3)).verdict is Outcome.PASS
    assert verdict_on(tmp_path / "b", r, r * 1.1).verdict is Outcome.DIVERGED


def test_another_dtype_is_compared_by_value(tmp_path):
    """A bf16 shard of a float32 gradient: its rounding is within 2 %, a wrong one is not."""
    r = normal(400)
    assert verdict_on(tmp_path / "a", r, r.bfloat16(), Kind.MAIN_GRAD).verdict is Outcome.PASS
    wrong = (r * 1.05).bfloat16()
    assert verdict_on(tmp_path / "b", r, wrong, Kind.MAIN_GRAD).verdict is Outcome.DIVERGED
