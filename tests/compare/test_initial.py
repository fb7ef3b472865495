# SPDX-License-Identifier: Apache-2.0
"""Initial values: wrong ones are found, and random numbers raise no alarm."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath import betainc, mp  # comes with torch

from megatron_ttrace.compare.initial import FEW, LIMIT, alike, cause, distance, judge
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step, describe, plan
from megatron_ttrace.report.wording import same_start_text
from megatron_ttrace.trace.findings import Cause, Note, Remark
from megatron_ttrace.trace.moments import Moments, moments_of
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Kind, Outcome, TraceKey
from megatron_ttrace.trace.views import local_view
from tests.placement.meshes import mesh_of

EPS = 2.0**-23
SHAPE = (64, 64)
NAME = "decoder.layers.0.mlp.linear_fc1.weight"
DIVIDED = (Step("tp", Shard(0)),)


def key_of(name=NAME):
    return TraceKey(1, -1, Kind.INITIAL, name)


def drawn(seed, *shape, std=0.02, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * std).to(dtype)


def typical(n, std=1.0):
    """The moments of ``n`` numbers that lie as evenly as normal ones can."""
    quantile = NormalDist(0.0, std).inv_cdf
    return moments_of(torch.tensor([quantile((i + 0.5) / n) for i in range(n)]).double())


def reference_of(data, name=NAME):
    return {key_of(name): (tuple(data.shape), moments_of(data, (0,) * data.dim()))}


def held(rank, data, shape=SHAPE, placement=(), mesh=SINGLE, name=NAME, state=0):
    boxes = plan(shape, placement, mesh)
    parts = (moments_of(local_view(data, box), box.logical) for box in boxes)
    moments = sum(parts, Moments(state=state))
    where = describe(placement), boxes, tuple(shape)
    return rank, Measured(key_of(name), *where, None, moments=moments)


def shards(*parts, shape=SHAPE, name=NAME, states=None):
    return [
        held(rank, part, shape, DIVIDED, mesh_of(rank, len(parts), tp=len(parts)), name, state)
        for rank, (part, state) in enumerate(zip(parts, states or [0] * len(parts), strict=True))
    ]


def verdicts_of(expected, *holders):
    measured: dict[int, list[Measured]] = {}
    for rank, one in holders:
        measured.setdefault(rank, []).append(one)
    return {verdict.name: verdict for verdict in judge(expected, measured, EPS)}


def verdict_of(expected, *holders):
    [verdict] = verdicts_of(expected, *holders).values()
    return verdict


REFERENCE = reference_of(drawn(1, *SHAPE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_random_numbers_pass(dtype):
    """Of the same distribution, in two parts or in one."""
    whole = verdict_of(REFERENCE, held(0, drawn(2, *SHAPE, dtype=dtype)))
    parts = verdict_of(
        REFERENCE, *shards(drawn(3, 32, 64, dtype=dtype), drawn(4, 32, 64, dtype=dtype))
    )
    for verdict in (whole, parts):
        assert verdict.verdict is Outcome.PASS
        assert 0.0 < verdict.margin < 1.0
        assert verdict.margin == pytest.approx(verdict.rel_err / verdict.tolerance)
        assert verdict.is_luck
    assert parts.ranks == (0, 1)


def test_same_values_have_no_error():
    assert verdict_of(REFERENCE, held(0, drawn(1, *SHAPE))).rel_err == 0.0


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3)], ids=["gate-up", "neighbours"])
def test_given_numbers_have_places(order):
    """Of a gated layer, both halves together may be cut, for instance."""
    quarters = drawn(1, *SHAPE).chunk(4)
    parts = torch.cat([quarters[at] for at in order]).chunk(2)
    verdict = verdict_of(REFERENCE, *shards(*parts))
    assert (verdict.verdict, verdict.ranks) == (Outcome.DIVERGED, (0, 1))
    assert [note.what for note in verdict.notes] == [Remark.DISPLACED]
    assert cause(verdict) is Cause.INITIAL_VALUES
    assert verdict_of(REFERENCE, *shards(*drawn(1, *SHAPE).chunk(2))).verdict is Outcome.PASS
    # Unless each layout cuts its random numbers its own way.
    expected = {key_of(): (SHAPE, moments_of(drawn(1, *SHAPE)))}
    assert verdict_of(expected, *shards(*parts)).verdict is Outcome.PASS


def test_a_transposed_square():
    assert verdict_of(REFERENCE, held(0, drawn(1, *SHAPE).t())).verdict is Outcome.DIVERGED


@pytest.mark.parametrize(("size", "share"), [(1.1, 0.45), (0.9, 0.7), (1.15, 0.99), (0.85, 0.99)])
def test_how_often_it_is_found(size, share):
    """Samples scatter: at the bound about half of them are beyond it, at 15 % all."""
    found = [
        distance(moments_of(drawn(seed, 4096, std=size)), moments_of(drawn(-seed, 4096, std=1.0)))
        for seed in range(1, 201)
    ]
    assert sum(statistic > LIMIT for statistic, _ in found) >= share * len(found)


@pytest.mark.parametrize("n", [512, 4096, 1 << 16])
def test_mean(n):
    """An offset of the bound is at the bound, in standard deviations."""
    plain = typical(n)
    offset = 6 * math.sqrt(2 / n)
    values = torch.tensor([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)]).double()
    below, _ = distance(moments_of(values + 0.98 * offset), plain)
    beyond, unit = distance(moments_of(values + 1.1 * offset), plain)
    assert below < LIMIT < beyond
    assert math.sqrt(LIMIT) * unit == pytest.approx(offset)


def tail(n, m):
    """The exact probability that two normal samples of ``n`` and ``m`` are beyond the bound.

    Student's and the F distribution's tails are incomplete beta functions.
    """
    mp.dps = 30
    free = n + m - 2
    t_squared = free * mp.expm1(mp.mpf(LIMIT) / free)
    total = betainc(free / 2, 0.5, 0, free / (free + t_squared), regularized=True)
    for d, e in ((n - 1, m - 1), (m - 1, n - 1)):

        def beyond(log_ratio, d=d, e=e):
            pooled = (d * mp.exp(log_ratio) + e) / (d + e)
            return (d + e) * mp.log(pooled) - d * log_ratio - LIMIT

        low, high = mp.mpf(0), mp.mpf(400)
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (middle, high) if beyond(middle) < 0 else (low, middle)
        total += betainc(e / 2, d / 2, 0, e / (e + d * mp.exp(high)), regularized=True)
    return float(total)


@pytest.mark.parametrize(
    ("n", "m"), [(FEW, FEW), (FEW, 512), (16, 16), (64, 128), (512, 512), (4096, 8192)]
)
def test_false_alarms(n, m):
    """Fewer than one in 10^8 tensors, for every number of elements."""
    assert 1e-9 < tail(n, m) < 1e-8


@pytest.mark.parametrize("n", [FEW, 20, 300])
@pytest.mark.parametrize("draw", [torch.randn, torch.rand])
def test_bound_by_simulation(n, draw):
    """Where it can be counted: beyond x with a probability of exp(-x/2) a side at most."""
    torch.manual_seed(n)
    found = [distance(moments_of(draw(n)), moments_of(draw(n)))[0] for _ in range(2000)]
    for x in (4.0, 7.0):
        # Four sides: two means, two variances; three standard deviations of the count.
        bound = 4 * math.exp(-x / 2)
        assert sum(one > x for one in found) / 2000 < bound + 3 * math.sqrt(bound / 2000)


@given(st.integers(FEW, 200), st.integers(FEW, 200), st.floats(1e-4, 1e4), st.integers(0, 999))
def test_no_units(n, m, size, seed):
    """Another unit changes nothing, nor does the sign."""
    one, other = drawn(seed, n, std=1.0).double(), drawn(seed + 1, m, std=2.0).double()
    plain, _ = distance(moments_of(one), moments_of(other))
    scaled, _ = distance(moments_of(one * -size), moments_of(other * -size))
    assert scaled == pytest.approx(plain, rel=1e-6, abs=1e-9)


@given(st.integers(0, 999), st.integers(FEW, 400), st.integers(2, 4), st.sampled_from((0.02, 1.0)))
def test_a_random_stream_per_rank(seed, n, ranks, std):
    """Copies of every size that each rank drew for itself."""
    copies = [drawn(10 * seed + rank + 1, n, std=std) for rank in range(ranks)]
    expected = reference_of(drawn(10 * seed, n, std=std))
    verdict = verdict_of(expected, *(held(rank, own, (n,)) for rank, own in enumerate(copies)))
    assert cause(verdict) is Cause.RANDOM_STATE


RIGHT, OTHER = drawn(2, *SHAPE), drawn(3, *SHAPE)
HALF, ONES, ZEROS = drawn(2, 32, 64), torch.ones(32), torch.zeros(4)
RUBBISH = torch.tensor([0.0, 1e30, 0.0, 3e-9])
WRONG = Outcome.DIVERGED, Cause.INITIAL_VALUES
APART = Outcome.REPLICA_CONFLICT, None
UNKNOWN = Outcome.UNCHECKED, Cause.INITIAL_VALUES


def copies(*parts):
    """Ranks with a whole parameter each."""
    return [held(rank, part, tuple(part.shape)) for rank, part in enumerate(parts)]


def cases():
    """Expected, holders; outcome, cause, remark and ranks."""
    for value in (0.0, 0.5):
        yield REFERENCE, copies(torch.full(SHAPE, value)), WRONG, Remark.LOST, (0,)
    yield reference_of(drawn(1, 7)), copies(torch.zeros(7)), WRONG, Remark.LOST, (0,)
    yield REFERENCE, shards(HALF, torch.zeros(32, 64)), WRONG, Remark.DISTRIBUTION, (1,)
    many = [drawn(10 + part, 64, 64, std=0.03 if part == 9 else 0.02) for part in range(16)]
    large = 16 * 64, 64
    expected = reference_of(drawn(1, *large))
    yield expected, shards(*many, shape=large), WRONG, Remark.DISTRIBUTION, (9,)
    # Ranks that hold the same part start with the same bits.
    yield REFERENCE, copies(RIGHT, RIGHT), (Outcome.PASS, Cause.INITIAL_VALUES), None, (0, 1)
    drawn_apart = Outcome.REPLICA_CONFLICT, Cause.RANDOM_STATE
    alone = copies(RIGHT, OTHER, RIGHT)
    yield REFERENCE, alone, drawn_apart, Remark.INITIAL_REPLICAS, (0, 1, 2)
    # Memory that is not random numbers of this distribution: empty, tiny, half, other bits, 1e30.
    for wrong in (
        torch.zeros(SHAPE),
        drawn(3, *SHAPE, std=3e-9),
        OTHER * torch.randint(0, 2, SHAPE, generator=torch.Generator().manual_seed(4)),
        torch.arange(64.0 * 64).reshape(SHAPE).int().view(torch.float32),
        RIGHT.index_fill(1, torch.tensor([5]), 1e30),
    ):
        yield REFERENCE, copies(RIGHT, wrong), WRONG, Remark.DISTRIBUTION, (1,)
    # Rearranged or scaled, copies come from one stream: nothing is known to be the cause.
    for wrong in (RIGHT.T.contiguous(), RIGHT.roll(7, 0), RIGHT * 1.02):
        yield REFERENCE, copies(RIGHT, wrong), APART, Remark.INITIAL_REPLICAS, (0, 1)
    few = copies(drawn(0, 4), drawn(1, 4))
    yield reference_of(drawn(5, 4)), few, APART, Remark.INITIAL_REPLICAS, (0, 1)
    # Equal shards of the same uninitialised memory, and of one random state or another.
    rubbish = drawn(2, 32, 64, std=5.0)
    yield REFERENCE, shards(rubbish, rubbish), WRONG, Remark.DISTRIBUTION, (0, 1)
    for states, cause_of in (((7, 7), Cause.RANDOM_STATE), ((7, 8), None), ((0, 0), None)):
        equal, diverged = shards(HALF, HALF, states=states), Outcome.DIVERGED
        yield REFERENCE, equal, (diverged, cause_of), Remark.SAME_START, (0, 1)
    # Constants: exactly, on every rank; a buffer that one rank left uninitialised.
    off = shards(ONES, ONES.index_fill(0, torch.tensor([3]), 1.0 + 1e-6), shape=(64,))
    ones = reference_of(torch.ones(64))
    yield ones, copies(torch.ones(64)), (Outcome.PASS, Cause.INITIAL_VALUES), None, (0,)
    yield ones, off, WRONG, Remark.NOT_THE_REFERENCES, (1,)
    for at, both in enumerate(((RUBBISH, ZEROS), (ZEROS, RUBBISH))):
        expected = reference_of(ZEROS)
        yield expected, copies(*both), WRONG, Remark.NOT_THE_REFERENCES, (at,)
    nan = RIGHT.index_fill(0, torch.tensor([3]), math.nan)
    bad = Outcome.NONFINITE, Cause.INITIAL_VALUES
    yield REFERENCE, copies(RIGHT, nan), bad, Remark.UNINITIALISED, (1,)
    # Memory that nothing initialises, however small; in the reference only, it is not this run's.
    for right in (RIGHT, drawn(1, 4)):
        missing = torch.full(right.shape, math.nan)
        for reference in (missing, right):
            both = copies(missing, missing)
            yield reference_of(reference), both, bad, Remark.UNINITIALISED, (0, 1)
        yield reference_of(missing), copies(right), UNKNOWN, Remark.REFERENCE_NONFINITE, (0,)
    # Nothing can be said.
    yield {}, copies(RIGHT), UNKNOWN, Reason.ONE_RUN, (0,)
    yield REFERENCE, [], UNKNOWN, Reason.ONE_RUN, ()
    yield REFERENCE, copies(drawn(2, 4, 4)), UNKNOWN, Remark.OTHER_SHAPE, (0,)
    halves = shards(HALF, drawn(3, 32, 64))
    yield REFERENCE, halves[:1], UNKNOWN, Remark.OVERLAP, (0,)
    yield REFERENCE, [*halves, held(2, OTHER)], UNKNOWN, Remark.OVERLAP, (0, 1, 2)
    yield reference_of(drawn(1, 7)), copies(drawn(2, 7)), UNKNOWN, Remark.FEW_VALUES, (0,)
    yield reference_of(drawn(1, 1)), copies(drawn(2, 1)), UNKNOWN, Remark.ONE_VALUE, (0,)


@pytest.mark.parametrize(("expected", "holders", "outcome", "remark", "ranks"), list(cases()))
def test_outcomes(expected, holders, outcome, remark, ranks):
    verdict = verdict_of(expected, *holders)
    assert (verdict.verdict, cause(verdict)) == outcome
    assert [note.what for note in verdict.notes] == ([remark] if remark else [])
    assert verdict.ranks == ranks
    if outcome is WRONG:
        assert verdict.margin > 1.0
    if remark is Remark.NOT_THE_REFERENCES:
        assert (verdict.rel_err, verdict.rel_err_eps, verdict.tolerance) == (
            math.inf,
            math.inf,
            0.0,
        )
    if remark is Remark.SAME_START:
        assert verdict.notes == (Note(remark, ranks=(0, 1), text="another part of it"),)


@pytest.mark.parametrize(
    ("heads", "dtype", "fails"),
    [
        (2, torch.float32, True),
        (4, torch.bfloat16, True),
        (2, torch.bfloat16, False),
        (1, torch.bfloat16, False),
    ],
)
def test_few_numbers_on_every_rank(heads, dtype, fails):
    """Of a number for each head, or its rank's number: equal by chance only if they are rounded."""
    own, expected = drawn(2, heads, dtype=dtype), reference_of(drawn(1, 2 * heads, dtype=dtype))
    equal, apart = (shards(own, each, shape=(2 * heads,)) for each in (own, drawn(3, heads)))
    assert verdict_of(expected, *equal).verdict.is_failure == fails
    assert not verdict_of(expected, *apart).verdict.is_failure


def test_equal_parts_that_are_the_references():
    """Decays that only differ along a row are given, not drawn."""
    decays = torch.arange(1.0, 9).log().repeat(8, 1)
    verdict = verdict_of(reference_of(decays), *shards(*decays.chunk(2), shape=(8, 8)))
    assert (verdict.verdict, verdict.notes) == (Outcome.PASS, ())


@pytest.mark.parametrize("leaf", ["local_experts.{}.linear_fc1.weight", "linear_fc1.weight{}"])
def test_equal_experts(leaf):
    """Two experts with one start; that the reference has such a pair as well excuses it."""
    data = drawn(2, *SHAPE)
    names = [f"decoder.layers.0.mlp.experts.{leaf.format(i)}" for i in (0, 1)]
    holders = [held(rank, data, name=name) for rank, name in enumerate(names)]
    apart = {**reference_of(drawn(5, *SHAPE), names[0]), **reference_of(data, names[1])}
    found = verdicts_of(apart, *holders)
    assert {one.verdict for one in found.values()} == {Outcome.DIVERGED}
    assert found[names[0]].notes == (Note(Remark.SAME_START, ranks=(0, 1), text=names[1]),)
    meant = {**reference_of(data, names[0]), **reference_of(data, names[1])}
    assert {one.verdict for one in verdicts_of(meant, *holders).values()} == {Outcome.PASS}


def test_equal_layers():
    """Two layers with one start: each is right by itself, but it is told."""
    data = drawn(2, *SHAPE)
    names = [f"decoder.layers.{i}.mlp.experts.linear_fc1.weight{1 - i}" for i in (0, 1)]
    apart = {**reference_of(drawn(5, *SHAPE), names[0]), **reference_of(drawn(6, *SHAPE), names[1])}
    holders = [held(rank, data, name=name) for rank, name in enumerate(names)]
    found = verdicts_of(apart, *holders)
    assert {one.verdict for one in found.values()} == {Outcome.PASS}
    assert found[names[0]].notes == (Note(Remark.SAME_START, ranks=(0, 1), text=names[1]),)
    assert [one.name for one in alike(found.values())] == names
    told = same_start_text(alike(found.values()))
    assert told.startswith(
        f"2 parameters have the same initial values as another layer's: {names[0]}: "
    )
    assert not alike([verdict_of(REFERENCE, held(0, data))])
