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
from megatron_ttrace.compare.tolerance import SAFETY
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, TraceKey
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.compare.traces import reference_of, tolerances_of

nan, inf = math.nan, math.inf
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOVED = 0.005
"""Every replay moved every tensor so far: tolerance 0.02."""


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def verdict_on(directory, reference, candidate, kind=Kind.OUTPUT):
    """The verdict on one tensor of one rank; in place and offline must agree."""
    place = (STEP_LEVEL if kind is Kind.MAIN_GRAD else 0, kind, "decoder.layers.0", 0)
    reader = reference_of(directory / "reference", {place: reference})
    saving = TraceWriter(directory / "candidate", 0)
    layout = RankLayout(SINGLE, 16, 1.0)
    sink = CompareSink(reader, 1, layout, writer=saving, keep_all=True)
    sink.placed(place, candidate, candidate.shape, ())
    saving.close()
    seal(directory / "candidate", {})
    offline = measure_saved(reader, TraceReader(directory / "candidate"))

    key = TraceKey(1, *place)
    tolerances = tolerances_of(reader, MOVED if reference.numel() else 0.0, replays=4)
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


def changed(data, at, value):
    copy = data.clone()
    copy.view(-1)[at] = value
    return copy


def cases():
    """Reference, candidate, and the outcome: pass, diverged, nonfinite or unchecked."""
    for dtype in FLOATS:
        zero, r = torch.zeros(40, dtype=dtype), normal(40, dtype=dtype)
        for value in (nan, inf, -inf):  # on one side
            yield r, changed(r, 7, value), Outcome.NONFINITE
            yield changed(r, 7, value), r, Outcome.NONFINITE
        yield zero, -zero, Outcome.PASS
        yield r, zero, Outcome.DIVERGED
        tiny = max(torch.finfo(dtype).tiny, torch.finfo(torch.float32).tiny)
        yield zero, changed(zero, 3, tiny), Outcome.DIVERGED
    for dtype in FP8:
        r = normal(16, 16, dtype=dtype)
        rows = torch.arange(16)[:, None]
        yield r, r.clone(), Outcome.PASS
        yield r, torch.where(rows == 3, 2.0, 1.0).mul(r.float()).to(dtype), Outcome.DIVERGED
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        r = torch.arange(1000).remainder(2).to(dtype)
        yield r, r.clone(), Outcome.PASS
        yield r, changed(r, 500, 1 - int(r[500])), Outcome.DIVERGED  # whatever the replays did
    r = normal(40)
    for value, outcome in ((inf, Outcome.PASS), (-inf, Outcome.PASS), (nan, Outcome.UNCHECKED)):
        both = changed(r, 7, value)
        yield both, both.clone(), outcome
        yield both, changed(both, 8, 9.0), Outcome.DIVERGED
    for shape in ((0,), (0, 4), (3, 0, 2)):  # an expert that got no token
        yield torch.zeros(shape), torch.zeros(shape), Outcome.PASS
    for scale in (1e-38, 1e-30, 1e30, 1e38):  # squares leave float32's range
        r = normal(400).clamp(-2, 2) * scale
        yield r, r * (1 + 1e-3), Outcome.PASS
        yield r, r * 1.1, Outcome.DIVERGED
    r = normal(400)  # a bf16 shard of a float32 gradient: its rounding is within 2 %
    yield r, r.bfloat16(), Outcome.PASS
    yield r, (r * 1.05).bfloat16(), Outcome.DIVERGED
    r, square = normal(12, 8), normal(9, 9)
    wide = torch.stack((r, r), dim=2)
    row = r[:1].expand(12, 8)
    for strided in (r.t().contiguous().t(), wide[..., 0]):
        yield r, strided, Outcome.PASS
    yield row, row, Outcome.PASS
    yield r, r.flip(0), Outcome.DIVERGED
    yield square, square.t(), Outcome.DIVERGED


def test_awkward_tensors(tmp_path):
    """NaN, infinity, zero, FP8, integers, no elements, other dtypes, any strides, any scale."""
    for number, (reference, candidate, outcome) in enumerate(cases()):
        verdict = verdict_on(tmp_path / str(number), reference, candidate)
        assert verdict.verdict is outcome, (number, reference, candidate)
        if not reference.numel():
            assert verdict.margin == 0.0
        if outcome is Outcome.UNCHECKED:
            assert verdict.notes == (Note(Reason.UNDEFINED, 1),)
        if outcome is Outcome.DIVERGED and not bool(reference.any()):
            assert verdict.rel_err == inf


@pytest.mark.parametrize("kind", [Kind.OUTPUT, Kind.GRAD_INPUT, Kind.MAIN_GRAD])
def test_one_wrong_element_of_many(tmp_path, kind):
    """It is lost in the error of the whole tensor, but rounding moves no element as far."""
    r = normal(1 << 18)
    at = int(r.abs().argmax())
    verdict = verdict_on(tmp_path / "a", r, changed(r, at, 0.0), kind)
    assert verdict.verdict is Outcome.DIVERGED
    assert Note(Remark.ELEMENT) in verdict.notes
    assert verdict.rel_err == pytest.approx(float(r[at].abs() / r.norm()), rel=1e-5)
    assert verdict.rel_err < SAFETY * MOVED
    assert verdict_on(tmp_path / "b", r, changed(r, at, r[at] * 1.02), kind).verdict is Outcome.PASS
    # Updates depend on signs: few of their elements may be far off.
    delta = verdict_on(tmp_path / "c", r, changed(r, at, 0.0), Kind.EXP_AVG_SQ)
    assert delta.verdict is Outcome.PASS
