# SPDX-License-Identifier: Apache-2.0
"""Every verdict from hand-made findings, and planted errors that must be found."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.compare.gathered import of_ranks
from megatron_ttrace.compare.judge import judge
from megatron_ttrace.compare.measure import Sums, measure, relative_error
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.tolerance import Tolerance, is_exact
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.placements import BlockShard, FlatShard, Shard, ZigZag
from megatron_ttrace.placement.plan import Step, describe, plan
from megatron_ttrace.report.wording import notes_text
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Kind, Outcome, TraceKey
from megatron_ttrace.trace.views import local_view, logical_view
from tests.placement.by_hand import local_shape
from tests.placement.meshes import mesh_of

EPS = 2.0**-7
KEY = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.mlp")
SHAPE = (4, 2)
WHOLE = (Box((0, 0), (4, 2), (0, 0)),)
TOP, BOTTOM = (Box((0, 0), (2, 2), (0, 0)),), (Box((2, 0), (2, 2), (0, 0)),)
inf, nan = math.inf, math.nan


@dataclasses.dataclass
class Known:
    """Tolerances that are given, not estimated."""

    value: float
    rms: float = 1.0

    def of(self, key):
        """The same for all that is not given itself."""
        return Tolerance(0.0 if is_exact(key) else self.value, self.rms)


def tolerances(tolerance=0.01):
    """Tolerances of unit elements."""
    return Known(tolerance)


def found(error=0.0, boxes=WHOLE, *, key=KEY, checksum=1, nonfinite=0, problem=None):
    """What a rank with reference elements of one measured: relative error ``error``."""
    n = sum(box.numel for box in boxes)
    sums = Sums(
        n=n,
        diff=n * error**2,
        reference=n,
        candidate=n,
        dot=n,
        worst=error,
        nonfinite=nonfinite,
        checksum=checksum,
    )
    return Measured(
        key=key,
        placement="tp:Shard(0)",
        boxes=boxes,
        logical_shape=SHAPE,
        sums=None if problem else sums,
        problem=problem,
    )


def verdict_of(*ranks, limits=None, key=KEY):
    """The verdict when rank i found ``ranks[i]`` (``None``: nothing)."""
    measured = {rank: [one] if one else [] for rank, one in enumerate(ranks)}
    [verdict] = judge([(key, SHAPE)], of_ranks(measured), limits or tolerances(), EPS)
    return verdict


def test_pass():
    """Within the tolerance on all ranks: every holder is named, and the worst error."""
    verdict = verdict_of(found(0.002, TOP), found(0.004, BOTTOM))
    assert verdict.verdict is Outcome.PASS
    assert verdict.ranks == (0, 1)
    assert verdict.rel_err == pytest.approx(0.004)
    assert verdict.rel_err_eps == pytest.approx(0.004 / EPS)
    assert verdict.tolerance == pytest.approx(0.01)
    assert verdict.margin == pytest.approx(0.4)
    assert (verdict.placement, verdict.shape, verdict.notes) == ("tp:Shard(0)", SHAPE, ())
    assert verdict.key == KEY


def test_diverged_names_the_failing_ranks_worst_first():
    """Ranks within the tolerance are not accused."""
    verdict = verdict_of(
        found(0.02, TOP), found(0.001, BOTTOM), found(0.5, TOP), found(0.002, BOTTOM)
    )
    assert verdict.verdict is Outcome.DIVERGED
    assert verdict.ranks == (2, 0)
    assert verdict.margin == pytest.approx(50)


def test_replica_conflict():
    """Replicas with different bits, and one of them wrong."""
    verdict = verdict_of(found(0.001, checksum=1), found(0.5, checksum=2))
    assert verdict.verdict is Outcome.REPLICA_CONFLICT
    assert verdict.ranks == (1,)
    assert notes_text(verdict.notes) == "replicas differ on ranks 0-1"


def test_replicas_that_agree_and_are_wrong_have_simply_diverged():
    """Equal bits on all replicas: no conflict, whatever else is wrong."""
    verdict = verdict_of(found(0.5, checksum=7), found(0.5, checksum=7))
    assert verdict.verdict is Outcome.DIVERGED


def test_other_shards_are_no_replicas():
    """Different boxes have different bits, of course."""
    verdict = verdict_of(found(0.5, TOP, checksum=1), found(0.0, BOTTOM, checksum=2))
    assert verdict.verdict is Outcome.DIVERGED


def test_replicas_may_differ_in_rounding():
    """Different bits within the tolerance pass, with a note."""
    verdict = verdict_of(found(0.001, checksum=1), found(0.002, checksum=2))
    assert verdict.verdict is Outcome.PASS
    assert notes_text(verdict.notes) == "replicas differ in rounding on ranks 0-1"


def test_missing():
    """The reference has it, no rank does."""
    verdict = verdict_of(None, None)
    assert verdict.verdict is Outcome.MISSING
    assert (verdict.ranks, verdict.rel_err, verdict.margin) == ((), None, None)
    assert verdict.shape == SHAPE


def test_extra():
    """A rank has it, the reference does not; nothing is dropped silently."""
    other = dataclasses.replace(KEY, name="unknown")
    verdicts = judge(
        [(KEY, SHAPE)],
        of_ranks(
            {
                0: [found(), found(key=other, problem="extra")],
                1: [found(key=other, problem="extra")],
            }
        ),
        tolerances(),
        EPS,
    )
    assert [v.verdict for v in verdicts] == [Outcome.PASS, Outcome.EXTRA]
    assert (verdicts[1].name, verdicts[1].ranks) == ("unknown", (0, 1))


def test_uncovered():
    """The lower half is held by nobody."""
    verdict = verdict_of(found(0.0, TOP), found(0.0, TOP))
    assert verdict.verdict is Outcome.UNCOVERED


def test_uneven_replicas_are_noted():
    """The upper half has three holders, the lower one."""
    verdict = verdict_of(found(0.0, WHOLE), found(0.0, TOP), found(0.0, TOP))
    assert verdict.verdict is Outcome.PASS
    assert notes_text(verdict.notes) == "held unevenly: 1 to 3 replicas"


def test_shape():
    """One rank's tensor cannot be placed: its own words are passed on."""
    verdict = verdict_of(found(), Measured.misfit(KEY, SHAPE, "(3,) is not an even part of (4,)"))
    assert verdict.verdict is Outcome.SHAPE
    assert (verdict.ranks, notes_text(verdict.notes)) == ((1,), "(3,) is not an even part of (4,)")


def test_nonfinite():
    """NaN on one rank, however small the error of the rest."""
    verdict = verdict_of(found(0.0, TOP), found(0.0, BOTTOM, nonfinite=3))
    assert verdict.verdict is Outcome.NONFINITE
    assert verdict.ranks == (1,)


@pytest.mark.parametrize("bad", [nan, inf])
def test_sums_that_are_no_numbers_never_pass(bad):
    """A NaN is not smaller than a tolerance."""
    one = found()
    sums = dataclasses.replace(one.sums, diff=bad, reference=bad)
    assert verdict_of(dataclasses.replace(one, sums=sums)).verdict is Outcome.DIVERGED


def test_blind_is_unchecked():
    """Where rounding alone moves a tensor by half, agreement means nothing."""
    verdict = verdict_of(found(0.3), limits=tolerances(0.5))
    assert verdict.verdict is Outcome.UNCHECKED
    assert notes_text(verdict.notes) == "blind: rounding alone moves it by 50% (bound 10%)"
    assert not verdict.verdict.is_failure


@pytest.mark.parametrize(("error", "outcome"), [(0.3, Outcome.UNCHECKED), (0.6, Outcome.DIVERGED)])
def test_a_tolerance_of_noise(error, outcome):
    """Of a model that is not deterministic, agreement within its noise means nothing."""
    limits = SimpleNamespace(of=lambda key: Tolerance(0.5, 1.0, repeated=0.1, is_noise=True))
    verdict = verdict_of(found(error), limits=limits)
    assert verdict.verdict is outcome
    noise = Reason.NONDETERMINISTIC if outcome is Outcome.UNCHECKED else None
    assert verdict.reason is noise


def test_beyond_a_blind_tolerance_is_still_a_failure():
    """Blindness excuses errors within the tolerance only."""
    assert verdict_of(found(0.6), limits=tolerances(0.5)).verdict is Outcome.DIVERGED


def test_an_infinite_tolerance_is_blind_to_an_infinite_error():
    """Of a count that is 0 in the reference, and is decided by rounding, no number is wrong."""
    one = found(1.0)
    sums = dataclasses.replace(one.sums, reference=0.0)
    verdict = verdict_of(dataclasses.replace(one, sums=sums), limits=Known(inf, 0.0))
    assert (verdict.verdict, verdict.rel_err, verdict.margin) == (Outcome.UNCHECKED, inf, 0.0)


@pytest.mark.parametrize(
    ("key", "error", "outcome", "margin"),
    [
        (TraceKey(1, 0, Kind.TOKENS, "tokens"), 0.0, Outcome.PASS, 0.0),
        (TraceKey(1, 0, Kind.TOKENS, "tokens"), 1e-6, Outcome.DIVERGED, inf),
        (TraceKey(1, -1, Kind.PARAM, "w", 0), 1e-9, Outcome.DIVERGED, inf),
        (TraceKey(1, -1, Kind.PARAM, "w", 1), 1e-9, Outcome.PASS, None),
    ],
)
def test_given_tensors_are_equal_or_wrong(key, error, outcome, margin):
    """Tokens and start parameters have no tolerance; parameters after the step do."""
    verdict = verdict_of(found(error, key=key), key=key)
    assert verdict.verdict is outcome
    assert margin is None or verdict.margin == margin


def test_one_verdict_per_tensor_in_execution_order():
    """As many verdicts as the reference has tensors, in its order."""
    keys = [dataclasses.replace(KEY, name=name) for name in ("b", "a", "c")]
    measured = {0: [found(key=keys[1]), found(key=keys[0])]}
    verdicts = judge([(key, SHAPE) for key in keys], of_ranks(measured), tolerances(), EPS)
    assert [(v.name, v.verdict.value) for v in verdicts] == [
        ("b", "pass"),
        ("a", "pass"),
        ("c", "missing"),
    ]


def test_the_worse_of_two_findings_of_one_rank_counts():
    """A rank that holds a tensor twice is judged by both."""
    [verdict] = judge([(KEY, SHAPE)], of_ranks({0: [found(0.5), found(0.0)]}), tolerances(), EPS)
    assert verdict.verdict is Outcome.DIVERGED


@pytest.mark.parametrize(
    ("sums", "rms", "expected"),
    [
        (Sums(), 1.0, 0.0),
        (Sums(n=4, diff=0.0, reference=0.0), 0.0, 0.0),
        (Sums(n=4, diff=4.0, reference=16.0), 2.0, 0.5),
        (Sums(n=4, diff=4.0, reference=0.0), 2.0, 0.5),  # a part of zeros in a larger tensor
        (Sums(n=4, diff=4.0, reference=64.0), 2.0, 0.25),
        (Sums(n=4, diff=1e-30, reference=0.0), 0.0, inf),
        (Sums(n=4, diff=nan, reference=1.0), 1.0, inf),
    ],
)
def test_relative_error(sums, rms, expected):
    """Relative to the part or to the whole tensor, whichever is larger."""
    assert relative_error(sums, rms) == expected


LAYOUTS = {
    "whole": ((), {}),
    "replicated": ((), {"tp": 2}),
    "tp": ((Step("tp", Shard(0)),), {"tp": 4}),
    "gated": ((Step("tp", BlockShard(1)),), {"tp": 2}),
    "cp": ((Step("cp", ZigZag(0)),), {"cp": 2}),
    "cp x sp": ((Step("cp", ZigZag(0)), Step("tp", Shard(0))), {"cp": 2, "tp": 2}),
    "zero": ((Step("tp", Shard(0)),), {"tp": 2}),
}


@st.composite
def candidates(draw):
    """A reference tensor, and a layout's ranks with their exact slices of it."""
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    placement, sizes = LAYOUTS[layout]
    world = math.prod(sizes.values())
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    shape = (8 * draw(st.integers(1, 4)), 4 * draw(st.integers(1, 4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = 10.0 ** draw(st.integers(-12, 6))
    logical = (torch.randn(shape, generator=generator) * size).to(dtype)
    ranks = []
    for rank in range(world):
        mesh = mesh_of(rank, world, **sizes)
        here = placement
        if layout == "zero":
            total = math.prod(local_shape(shape, placement, mesh))
            here = (*placement, Step("dp", FlatShard(0, total)))
        boxes = plan(shape, here, mesh)
        local = torch.empty(local_shape(shape, here, mesh), dtype=dtype)
        for box in boxes:
            local_view(local, box).copy_(logical_view(logical, box))
        ranks.append((describe(here), boxes, local))
    return logical, ranks, generator


def judged(logical, ranks, tolerance):
    """Measure every rank, judge."""
    limits = Known(tolerance, float(logical.double().norm()) / math.sqrt(logical.numel()))
    measured = {
        rank: [Measured(KEY, where, boxes, tuple(logical.shape), measure(local, logical, boxes))]
        for rank, (where, boxes, local) in enumerate(ranks)
    }
    [verdict] = judge([(KEY, tuple(logical.shape))], of_ranks(measured), limits, EPS)
    return verdict


TOLERANCE = 0.02


@settings(max_examples=200)
@given(candidates(), st.data())
def test_errors_from_twice_the_tolerance_are_always_found(candidate, data):
    """An error of 2 x tolerance of the whole tensor, hidden in a random box of one rank."""
    logical, ranks, generator = candidate
    rank = data.draw(st.integers(0, len(ranks) - 1), "rank")
    local = ranks[rank][2]
    n = data.draw(st.integers(1, local.numel()), "elements")
    start = data.draw(st.integers(0, local.numel() - n), "start")
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    size = data.draw(st.floats(2.0, 1e3), "times the tolerance") * TOLERANCE
    noise *= size * float(logical.double().norm()) / float(noise.norm())
    flat = local.reshape(-1)
    flat[start : start + n] = (flat[start : start + n].double() + noise).to(local.dtype)
    verdict = judged(logical, ranks, TOLERANCE)
    assert verdict.verdict in (Outcome.DIVERGED, Outcome.REPLICA_CONFLICT)
    assert verdict.ranks == (rank,)
    if len(ranks) > 1 and ranks[0][0] == "Replicate":
        assert verdict.verdict is Outcome.REPLICA_CONFLICT


@settings(max_examples=200)
@given(candidates())
def test_half_the_tolerance_on_every_rank_is_never_flagged(candidate):
    """Each rank's part is off by 0.5 x tolerance of itself: rounding, not a bug."""
    logical, ranks, generator = candidate
    for _, _, local in ranks:
        noise = torch.randn(local.shape, generator=generator, dtype=torch.float64)
        noise *= 0.5 * TOLERANCE * float(local.double().norm()) / float(noise.norm())
        local.copy_((local.double() + noise).to(local.dtype))
    assert judged(logical, ranks, TOLERANCE).verdict is Outcome.PASS


@pytest.mark.parametrize("unit", [0.0, 2.0**-23])
def test_an_error_in_epsilons(unit):
    """Of the tensor's own dtype where that is known, else of the job's."""

    class Other(Known):
        def of(self, key):
            return dataclasses.replace(super().of(key), unit=unit)

    verdict = verdict_of(found(0.004), limits=Other(0.01))
    assert verdict.rel_err_eps == pytest.approx(0.004 / (unit or EPS))
