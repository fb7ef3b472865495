# SPDX-License-Identifier: Apache-2.0
"""From movements of replays to tolerances: pooling, floors, exact kinds, blindness, the file."""

import dataclasses
import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare import quantiles, replaying, tolerance
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.moved import FILE, Moved, read_moves, write_moves
from megatron_ttrace.compare.tolerance import (
    BLIND,
    SAFETY,
    Tolerances,
    epsilon,
    is_exact,
)
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, MetricIndex, ParamIndex, TraceKey

KEY = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.mlp")
FP32, BF16 = 2.0**-23, 2.0**-7


def of(key, moved, dtype="bfloat16", **others):
    return Tolerances(moved, dict.fromkeys(moved, dtype), **others).of(key)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", 2.0**-23),
        ("torch.float32", 2.0**-23),
        (torch.bfloat16, 2.0**-7),
        ("float16", 2.0**-10),
        ("float64", 2.0**-52),
        ("float8_e4m3fn", 2.0**-7),
        ("float8_e5m2", 2.0**-7),
        ("int64", 0.0),
        ("bool", 0.0),
    ],
)
def test_epsilon(dtype, expected):
    """As torch has it; FP8 counts as bf16, discrete dtypes have none."""
    assert epsilon(dtype) == expected


@pytest.mark.parametrize(
    ("repeated", "expected"), [(0.0, False), (0.004, False), (0.009, False), (0.02, True)]
)
def test_what_is_not_rounding(repeated, expected, tmp_path):
    """A step that moves a tensor without perturbation: by an epsilon, a little, or as far."""
    moved = {KEY: Moved(400, 40.0, (0.01, 0.02), repeated)}
    assert of(KEY, moved).is_noise == expected
    assert not of(KEY, {KEY: Moved(400, 40.0, (0.01, 0.2), repeated)}).is_noise
    assert of(dataclasses.replace(KEY, microbatch=3), {**moved, **other(KEY)}).is_noise == expected
    write_moves(tmp_path, moved)
    found = Tolerances(read_moves(tmp_path, moved), dict.fromkeys(moved, "bfloat16"))
    assert found.of(KEY) == of(KEY, moved)
    assert found.repeated == ([KEY] if repeated else [])


def test_noise_moves_the_elements_of_a_tensor_together():
    """Two replays and the unperturbed one are three samples, however many elements there are."""
    quiet, noisy = (
        of(KEY, {KEY: Moved(10_000, 100.0, (0.01, 0.02), repeated)}) for repeated in (0.0, 0.009)
    )
    assert noisy.value == pytest.approx(quiet.value * quantiles.few_samples(3))


def test_a_weight_is_repeated_if_its_gradient_is():
    """Adam's first step is the sign of any gradient: that of noise is the same, mostly."""
    weight = TraceKey(1, STEP_LEVEL, Kind.PARAM, "w", ParamIndex.AFTER)
    gradient, update = (
        dataclasses.replace(weight, kind=kind, index=0)
        for kind in (Kind.MAIN_GRAD, Kind.PARAM_DELTA)
    )
    for repeated in itertools.product((0.0, 1e-3), repeat=2):
        moved = {
            key: Moved(4, 2.0, (0.01, 0.01), distance)
            for key, distance in zip((gradient, update), repeated, strict=True)
        }
        found = Tolerances(moved, dict.fromkeys(moved, "float32"))
        assert found.is_repeated(weight) == (not any(repeated))


@given(share=st.floats(0.0, 1.0), parts=st.sampled_from([1, 2, 4, 100]))
def test_a_part_may_have_the_element_that_moved_most(share, parts):
    """Its squared error is its share of the rest, and all of that element's."""
    total, peak = 0.01**2, share * 0.01**2
    moved = {KEY: Moved(400, 40.0, (0.01, 0.0), peak=math.sqrt(peak))}
    tolerance = of(KEY, moved)
    expected = SAFETY * math.sqrt((total - peak) + peak * parts)
    assert tolerance.part(400 // parts) == pytest.approx(expected)
    assert tolerance.part(400) == tolerance.part(0) == tolerance.value == SAFETY * 0.01


@pytest.mark.parametrize(("n", "most"), [(200, 0.008), (64, 0.008), (4, 0.002)])
def test_a_part_may_have_the_row_that_moved_most(n, most, tmp_path):
    """All of its squared error, but not more than of as many elements as the part has."""
    moved = {KEY: Moved(400, 40.0, (0.01, 0.0), peak=0.001, row=0.008)}
    expected = SAFETY * math.sqrt(0.01**2 + most**2 * (400 / n - 1))
    assert of(KEY, moved).part(n) == pytest.approx(expected)
    write_moves(tmp_path, moved)
    assert read_moves(tmp_path, moved) == moved


def test_the_row_that_moved_farthest():
    """Of all leading dimensions, in blocks."""
    theirs = torch.zeros(2, 3, 4)
    ours = theirs.clone()
    ours[1, 0, :2] = torch.tensor([3.0, 4.0])
    ours[0, 2, 3] = 4.5
    assert replaying.farthest_row(ours, theirs) == 5.0
    with mock.patch.object(replaying, "_BLOCK", 4):
        assert replaying.farthest_row(ours, theirs) == 5.0
    ours[0, 0, 0] = math.nan
    assert replaying.farthest_row(ours, theirs) == 0.0


def test_one_element_where_replays_round_few(tmp_path):
    """It may be rounded as any other: the largest by its share of the norm."""
    n, rounding = 1 << 16, SAFETY * 2.0**-8
    still = {KEY: Moved(n, 1.0, (0.0, 0.0), top=0.25)}
    assert of(KEY, still).element == rounding * 0.25
    even = {KEY: Moved(n, 1.0, (0.0, 0.0), top=2.0**-8)}
    assert of(KEY, even).element == 5 * rounding * 2.0**-8
    shaken = {KEY: Moved(n, 1.0, (0.01, 0.01), peak=0.001)}
    assert of(KEY, shaken).element == pytest.approx(5 * SAFETY * 0.001)
    unknown = of(KEY, {KEY: Moved(n, 1.0, (0.0, 0.0))})
    assert unknown.element == unknown.value
    write_moves(tmp_path, still)
    assert read_moves(tmp_path, still) == still


def test_replays_of_a_tensor():
    """Distances of all of them, and the largest of one element."""
    first = Moved.after(None, Sums(4, diff=0.09, reference=4.0, worst=0.3))
    assert first == Moved(4, 2.0, (0.15,), peak=0.15)
    rows = Moved.after(first, Sums(4, diff=0.0, reference=4.0), 0.1)
    assert Moved.after(rows, Sums(4, diff=0.0, reference=4.0), 0.02).row == 0.05
    second = Moved.after(first, Sums(4, diff=0.16, reference=4.0, worst=0.2))
    assert second == Moved(4, 2.0, (0.15, 0.2), peak=0.15)
    assert Moved.after(second, None) == Moved(4, 2.0, (0.15, 0.2, math.inf), peak=0.15)
    assert Moved.after(None, None) == Moved(0, 0.0, (math.inf,))


def other(key):
    """The same tensor of another microbatch, which no replay moved without perturbation."""
    return {dataclasses.replace(key, microbatch=3): Moved(400, 40.0, (0.01, 0.01))}


def step(kind, name="w", index=0):
    return TraceKey(1, STEP_LEVEL, kind, name, index)


THIRD = dataclasses.replace(KEY, microbatch=3)
MAIN, DELTA, PARAM = (step(kind) for kind in (Kind.MAIN_GRAD, Kind.PARAM_DELTA, Kind.PARAM))
NORM, MEAN = step(Kind.GRAD_NORM, "grad_norm"), step(Kind.LOSS, "lm loss")
POOLED = {KEY: Moved(400, 40.0, (0.01,)), THIRD: Moved(400, 20.0, (0.03,))}
STILL = Moved(400, 40.0, (0.0,))
CHANGED = {DELTA: Moved(4, 0.001, (0.0,)), PARAM: Moved(4, 10.0, (0.0,))}
SUMS = {
    step(Kind.MAIN_GRAD, "a"): Moved(1 << 19, 1.0, (0.0,)),
    step(Kind.MAIN_GRAD, "b"): Moved(1 << 19, 1.0, (0.0,)),
    TraceKey(1, 0, Kind.OUTPUT, "model"): Moved(256, 1.0, (0.0,)),
    TraceKey(1, 0, Kind.OUTPUT, "other"): Moved(1 << 30, 1.0, (0.0,)),
    NORM: Moved(1, 1.0, (0.0,)),
    MEAN: Moved(1, 1.0, (0.0,)),
}
FAR = Moved(4, 2.0, (0.5,))


@pytest.mark.parametrize(
    ("key", "moved", "dtype", "expected"),
    [
        # The largest movement over seeds counts.
        (KEY, {KEY: Moved(400, 40.0, (0.01, 0.02, 0.005))}, "bfloat16", {"value": SAFETY * 0.02}),
        # The same module on other data is another sample of the same statistic.
        (KEY, POOLED, "bfloat16", {"value": SAFETY * 0.03, "rms": 2.0}),
        (THIRD, POOLED, "bfloat16", {"value": SAFETY * 0.03, "rms": 1.0}),
        *(
            (KEY, {KEY: POOLED[KEY], dataclasses.replace(KEY, **other): FAR}, "bfloat16", expected)
            for expected in [{"value": SAFETY * 0.01}]
            for other in ({"iteration": 2}, {"kind": Kind.INPUT}, {"name": "other"}, {"index": 1})
        ),
        # A tensor that no replay moved may still be rounded once. What a module computes has its
        # own epsilon; a gradient in float32 was computed from narrower numbers, the job's.
        (KEY, {KEY: STILL}, "float32", {"value": SAFETY * FP32 / 2, "unit": FP32}),
        (KEY, {KEY: STILL}, "bfloat16", {"value": SAFETY * BF16 / 2, "unit": BF16}),
        (MAIN, {MAIN: STILL}, "float32", {"value": SAFETY * FP32 / 2, "unit": 0.0}),
        (KEY, {KEY: Moved(4, 0.0, (0.0,))}, "float32", {"value": SAFETY * FP32 / 2, "rms": 0.0}),
        # A difference of two rounded parameters has their rounding error.
        (DELTA, CHANGED, "float32", {"value": SAFETY * FP32 / 2 * 1e4}),
        (DELTA, {DELTA: CHANGED[DELTA]}, "float32", {"value": SAFETY * FP32 / 2}),
        # The gradient norm sums all main gradients, the loss the model's output.
        (NORM, SUMS, "float32", {"value": SAFETY * FP32 / 2 * 20}),
        (MEAN, SUMS, "float32", {"value": SAFETY * FP32 / 2 * 8}),
        # Integers are exact.
        (KEY, {KEY: FAR}, "int64", {"value": 0.0}),
    ],
)
def test_values(key, moved, dtype, expected):
    found = of(key, moved, dtype)
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "moved", "times"),
    [
        # Replays moved it by a third of one rounding of each element.
        ("bfloat16", BF16 / 6, 3.0),
        ("bfloat16", BF16, 1.0),
        ("bfloat16", 0.0, 1.0),
        ("bfloat16", math.inf, 1.0),
        # A replay moved the rest by clipping: twice the rounding at most.
        ("bfloat16", BF16 * 1e-9, BF16 / 1e-5),
        ("float32", BF16 / 6, 1.0),
    ],
)
@pytest.mark.parametrize("kind", [Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ])
def test_what_is_computed_from_a_gradient_moves_with_it(kind, dtype, moved, times):
    """A layout may round its elements where replays did not."""
    key = step(kind)
    known = {MAIN: Moved(400, 40.0, (moved,)), key: Moved(400, 40.0, (1e-5,), peak=1e-6)}
    found = Tolerances(known, {MAIN: dtype, key: "float32"}).of(key)
    assert found.value == pytest.approx(times * SAFETY * 1e-5)
    assert found.peak == pytest.approx(times * SAFETY * 1e-6)


@pytest.mark.parametrize("terms", [10**3, 10**6, 10**9, 10**12])
def test_a_gradient_norm_off_by_1e_5_is_beyond_any_fp32_tolerance(terms):
    """With replays that move it by two roundings, in models of up to 10^12 parameters."""
    norm = TraceKey(1, STEP_LEVEL, Kind.GRAD_NORM, "grad_norm")
    moved = {
        TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, "a"): Moved(terms, 1.0, (1e-6,)),
        norm: Moved(1, 1.0, (2 * FP32, 0.0, FP32, FP32)),
    }
    assert of(norm, moved, "float32").value < 1e-5


@pytest.mark.parametrize(
    ("kind", "index", "exact"),
    [
        (Kind.TOKENS, 0, True),
        (Kind.PARAM, 0, True),
        (Kind.PARAM, 1, False),
        (Kind.OUTPUT, 0, False),
        (Kind.MAIN_GRAD, 0, False),
    ],
)
def test_what_is_given_is_exact(kind, index, exact):
    """Tokens and start parameters, even if replays moved them (they perturb parameters)."""
    key = TraceKey(1, STEP_LEVEL, kind, "w", index)
    assert is_exact(key) == exact
    assert (of(key, {key: Moved(4, 2.0, (0.5,))}).value == 0.0) == exact


@pytest.mark.parametrize(
    ("moved", "blind"),
    [(0.0, False), (BLIND / SAFETY, False), (0.03, True), (math.inf, True), (math.nan, True)],
)
def test_blindness(moved, blind):
    """A tolerance beyond the bound shows nothing; a replay of NaN least of all."""
    assert of(KEY, {KEY: Moved(400, 20.0, (0.0, moved))}, "float32").blind == blind
    assert of(KEY, {KEY: Moved(400, 20.0, (moved, 0.0))}, "float32").blind == blind


@pytest.mark.parametrize(
    ("index", "least"),
    [(MetricIndex.VALUE, FP32 / 2), (MetricIndex.LOSS, BF16 / 2), (MetricIndex.CHOSEN, math.inf)],
)
def test_metrics_of_a_step_in_bf16(index, least):
    """A mean that is rounded to BF16 may move by that though no replay shows it; a rate may not."""
    key = TraceKey(1, -1, Kind.METRIC, "z_loss", index)
    found = Tolerances({key: Moved(1, 2.0, (0.0, 0.0))}, {key: "float32"}, compute=BF16)
    assert found.of(key).value >= SAFETY * least
    assert (found.of(key).value < SAFETY * BF16 / 2) == (index == MetricIndex.VALUE)


def test_the_file_keeps_every_number(tmp_path):
    """Infinities and the last bit survive."""
    other = dataclasses.replace(KEY, microbatch=1, index=2)
    moved = {
        KEY: Moved(16, 0.1 + 0.2, (1 / 3, math.inf), peak=1 / 7),
        other: Moved(0, 0.0, (0.0, 5e-324)),
    }
    write_moves(tmp_path, moved)
    assert read_moves(tmp_path, moved) == moved
    assert of(KEY, moved, "float32").blind


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"\xff\xfe\x00noise",
        b'{"key": [1, 0, "nonsense", "a", 0], "n": 1, "norm": "1", "moved": []}',
        b"[]",
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    """One clear line, with what to do."""
    (tmp_path / FILE).write_bytes(damage + b"\n")
    with pytest.raises(TTraceError, match=r"tolerances.jsonl:1 is damaged .*: make the reference"):
        read_moves(tmp_path, [])


def test_a_trace_without_tolerances_is_no_reference(tmp_path):
    with pytest.raises(TTraceError, match="is not a reference trace"):
        read_moves(tmp_path, [])


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(0, 193.5), (1, 193.5), (4, 2.62), (9, 1.53), (200, 1.0), (10**9, 1.0)],
)
def test_few_samples_count_less(samples, expected):
    """Student's t over the normal quantile, and never less for fewer samples."""
    assert tolerance.few_samples(samples) == pytest.approx(expected, rel=0.01)
    assert tolerance.few_samples(samples) >= tolerance.few_samples(samples + 1)


@pytest.mark.parametrize(
    ("moved", "dtype", "n", "enough"),
    [
        ((0.01,), "bfloat16", 4096, False),  # nothing to compare it with
        ((0.01, 0.012), "bfloat16", 4096, True),
        ((0.01, 0.019), "bfloat16", 4096, True),
        ((0.01, 0.021), "bfloat16", 4096, False),  # more than half of what the other allows
        ((0.01, 0.021, 0.02), "bfloat16", 4096, True),
        ((1e-9, 1e-7), "float32", 4096, True),  # both below one rounding of every element
        ((1e-4, 1e-4), "bfloat16", 1, True),  # a scalar's floor is wider
        ((0.01, 0.01), "bfloat16", 1, False),  # a third replay would more than halve 9.6
        ((0.009, 0.009, 0.009), "bfloat16", 1, False),  # blind, and not with a fourth
        ((0.3, 0.9), "bfloat16", 4096, True),  # blind whatever further replays do
        ((0.01, math.inf), "bfloat16", 4096, False),
        ((math.nan, math.nan), "bfloat16", 4096, True),
        ((5.0, 1.0), "int64", 4096, True),  # equality is tested
    ],
)
def test_enough_replays(moved, dtype, n, enough):
    """Every replay passes with half the tolerance from the others, and one more adds little."""
    tolerances = Tolerances({KEY: Moved(n, 1.0, moved)}, {KEY: dtype})
    assert tolerances.suffice() is enough


def test_one_tensor_that_needs_more_replays_is_enough_for_them():
    """All tensors count; microbatches are one tensor."""
    other = dataclasses.replace(KEY, microbatch=1)
    third = dataclasses.replace(KEY, name="decoder.layers.1.mlp")
    moved = {KEY: Moved(64, 1.0, (0.01, 0.03)), other: Moved(64, 1.0, (0.03, 0.01))}
    dtypes = dict.fromkeys((*moved, third), "bfloat16")
    assert Tolerances(moved, dtypes).suffice()
    moved[third] = Moved(64, 1.0, (0.01, 0.03))
    assert not Tolerances(moved, dtypes).suffice()
