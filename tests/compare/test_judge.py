# SPDX-License-Identifier: Apache-2.0
"""Every verdict from hand-made findings, and planted errors that must be found."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare.gathered import of_ranks
from megatron_ttrace.compare.judge import judge
from megatron_ttrace.compare.measure import Sums, measure, relative_error
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.tolerance import Tolerance, is_exact
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.placements import BlockShard, FlatShard, Shard, ZigZag
from megatron_ttrace.placement.plan import Step, describe, plan
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Kind, Outcome, ParamIndex, TraceKey
from megatron_ttrace.trace.views import local_view, logical_view
from tests.placement.by_hand import local_shape
from tests.placement.meshes import mesh_of

EPS = 2.0**-7
KEY = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.mlp")
SHAPE = (4, 2)
WHOLE = (Box((0, 0), (4, 2), (0, 0)),)
TOP, BOTTOM = (Box((0, 0), (2, 2), (0, 0)),), (Box((2, 0), (2, 2), (0, 0)),)
inf, nan = math.inf, math.nan


WEIGHT = TraceKey(1, -1, Kind.PARAM, "decoder.final_layernorm.weight", ParamIndex.AFTER)
UPDATE = TraceKey(1, -1, Kind.PARAM_DELTA, WEIGHT.name)


@dataclasses.dataclass
class Known:
    """Tolerances that are given, not estimated, of elements of this size."""

    value: float = 0.01
    rms: float = 1.0
    more: dict = dataclasses.field(default_factory=dict)
    moving: tuple = ()

    def of(self, key):
        return Tolerance(0.0 if is_exact(key) else self.value, self.rms, **self.more)

    def is_repeated(self, key):
        return key not in self.moving


def found(error=0.0, boxes=WHOLE, *, key=KEY, problem=None, **more):
    """What a rank with reference elements of one measured: relative error ``error``."""
    n = sum(box.numel for box in boxes)
    about = {"n": n, "diff": n * error**2, "reference": n, "candidate": n, "dot": n, "worst": error}
    sums = None if problem else Sums(**{**about, "checksum": 1, **more})
    return Measured(key, "tp:Shard(0)", boxes, SHAPE, sums, problem=problem)


def verdict_of(*ranks, limits=None, key=KEY):
    """The verdict when rank i found ``ranks[i]`` (``None``: nothing)."""
    measured = {rank: [one] if one else [] for rank, one in enumerate(ranks)}
    [verdict] = judge([(key, SHAPE)], of_ranks(measured), limits or Known(), EPS)
    return verdict


def test_every_field():
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
    known = verdict_of(found(0.004), limits=Known(more={"unit": 2.0**-23}))
    assert known.rel_err_eps == pytest.approx(0.004 * 2**23)  # of the tensor's own dtype
    missing = verdict_of(None, None)
    assert (missing.rel_err, missing.margin, missing.shape) == (None, None, SHAPE)


@pytest.mark.parametrize("kind", [Kind.PARAM, Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ])
def test_what_an_update_leaves_has_the_same_bits_in_all_copies(kind):
    """A weight that was never gathered is within the tolerance in bf16, as is what hides in it."""
    key = dataclasses.replace(WEIGHT, kind=kind)
    stale = found(0.0, key=key, checksum=1), found(1e-4, key=key, checksum=2)
    verdict = verdict_of(*stale, key=key)
    assert (verdict.verdict, verdict.ranks) == (Outcome.REPLICA_CONFLICT, (0, 1))
    assert verdict.notes == (Note(Remark.REPLICAS, ranks=(0, 1)),)
    parts = found(0.0, TOP, key=key, checksum=1), found(1e-4, BOTTOM, key=key, checksum=2)
    assert verdict_of(*parts, key=key).verdict is Outcome.PASS
    # On a GPU, where a step that is repeated moves the update, ranks may round differently.
    assert verdict_of(*stale, key=key, limits=Known(moving=(key,))).verdict is Outcome.PASS


@pytest.mark.parametrize(("checksums", "outcome"), [((1, 1), "unchecked"), ((1, 2), "conflict")])
def test_copies_of_what_depends_on_the_layout(checksums, outcome):
    """A rank's own shard of a matrix is updated by itself, and alike in all replicas."""
    measured = {r: [found(0.3, TOP, key=WEIGHT, checksum=c)] for r, c in enumerate(checksums)}
    held = of_ranks({**measured, 2: [found(0.3, BOTTOM, key=WEIGHT, checksum=3)]})
    [verdict] = judge([(WEIGHT, SHAPE)], held, Known(), EPS, lambda key, holders: Reason.OWN_SHARD)
    assert verdict.verdict.value.endswith(outcome)
    assert verdict.ranks == ((0, 1) if outcome == "conflict" else ())


BLIND, NOISE = Known(0.5), Known(0.5, more={"repeated": 0.1, "is_noise": True})
MISFIT = Measured.misfit(KEY, SHAPE, "(3,) is not an even part of (4,)")


@pytest.mark.parametrize(
    ("ranks", "limits", "outcome", "failing", "note"),
    [
        # Ranks within the tolerance are not accused; the worst one is first.
        (
            (found(0.02, TOP), found(0.001, BOTTOM), found(0.5, TOP), found(0.002, BOTTOM)),
            *(Known(), Outcome.DIVERGED, (2, 0), None),
        ),
        (
            (found(0.001, checksum=1), found(0.5, checksum=2)),
            *(Known(), Outcome.REPLICA_CONFLICT, (1,), Note(Remark.REPLICAS, ranks=(0, 1))),
        ),
        ((found(0.5), found(0.5)), Known(), Outcome.DIVERGED, (0, 1), None),
        # Different boxes are no replicas.
        (
            (found(0.5, TOP, checksum=1), found(0.0, BOTTOM, checksum=2)),
            *(Known(), Outcome.DIVERGED, (0,), None),
        ),
        (
            (found(0.001, checksum=1), found(0.002, checksum=2)),
            *(Known(), Outcome.PASS, (0, 1), Note(Remark.REPLICAS_ROUNDED, ranks=(0, 1))),
        ),
        ((None, None), Known(), Outcome.MISSING, (), Note(Remark.MISSING)),
        ((found(0, TOP),) * 2, Known(), Outcome.UNCOVERED, (0, 1), Note(Remark.UNCOVERED)),
        (
            (found(0.0, WHOLE), found(0.0, TOP), found(0.0, TOP)),
            *(Known(), Outcome.PASS, (0, 1, 2), Note(Remark.UNEVEN, 1, 3)),
        ),
        ((found(), MISFIT), Known(), Outcome.SHAPE, (1,), MISFIT.note),
        (
            (found(0.0, TOP), found(0.0, BOTTOM, nonfinite=3)),
            *(Known(), Outcome.NONFINITE, (1,), Note(Remark.NONFINITE)),
        ),
        # A NaN is not smaller than a tolerance.
        ((found(diff=nan, reference=nan),), Known(), Outcome.DIVERGED, (0,), None),
        ((found(diff=inf, reference=inf),), Known(), Outcome.DIVERGED, (0,), None),
        ((found(0.3),), BLIND, Outcome.UNCHECKED, (0,), Note(Reason.BLIND, 0.5, 0.1)),
        ((found(0.6),), BLIND, Outcome.DIVERGED, (0,), None),
        ((found(0.3),), NOISE, Outcome.UNCHECKED, (0,), Note(Reason.NONDETERMINISTIC, 0.1)),
        ((found(0.6),), NOISE, Outcome.DIVERGED, (0,), None),
    ],
)
def test_outcomes(ranks, limits, outcome, failing, note):
    verdict = verdict_of(*ranks, limits=limits)
    assert (verdict.verdict, verdict.ranks) == (outcome, failing)
    assert verdict.notes == ((note,) if note else ())
    assert (verdict.reason is Reason.NONDETERMINISTIC) == (limits is NOISE and note is not None)


def test_an_infinite_tolerance_is_blind_to_an_infinite_error():
    """Of a count that is 0 in the reference, and is decided by rounding, no number is wrong."""
    verdict = verdict_of(found(1.0, reference=0.0), limits=Known(inf, 0.0))
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


@pytest.mark.parametrize(
    ("peak", "error", "outcome"),
    [
        (0.0, 0.011, Outcome.DIVERGED),
        (0.005, 0.011, Outcome.PASS),
        (0.005, 0.0112, Outcome.DIVERGED),
        (0.01, 0.014, Outcome.PASS),
        (0.01, 0.0142, Outcome.DIVERGED),
    ],
)
def test_one_element_in_half_of_a_tensor(peak, error, outcome):
    """A half may have all of the error that the whole one's largest element may have."""
    limits = Known(more={"n": 8, "peak": peak})
    verdict = verdict_of(found(error, TOP), found(0.0, BOTTOM), limits=limits)
    assert verdict.verdict is outcome
    assert verdict.tolerance == pytest.approx(math.hypot(0.01, peak))
    assert verdict.margin == pytest.approx(error / verdict.tolerance)


def test_one_verdict_per_tensor_in_execution_order():
    """Last what the reference does not have: nothing is dropped silently."""
    *keys, unknown = (dataclasses.replace(KEY, name=name) for name in "bacd")
    other = found(key=unknown, problem="extra")
    held = of_ranks({0: [found(key=keys[1]), other, found(key=keys[0])], 1: [other]})
    verdicts = judge([(key, SHAPE) for key in keys], held, Known(), EPS)
    outcomes = [(v.name, v.verdict.value) for v in verdicts]
    assert outcomes == [("b", "pass"), ("a", "pass"), ("c", "missing"), ("d", "extra")]
    assert verdicts[3].ranks == (0, 1)


def test_the_worse_of_two_findings_of_one_rank_counts():
    """A rank that holds a tensor twice is judged by both."""
    [verdict] = judge([(KEY, SHAPE)], of_ranks({0: [found(0.5), found(0.0)]}), Known(), EPS)
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
    limits = Known(tolerance, float(logical.double().norm()) / math.sqrt(logical.numel()))
    measured = {
        rank: [Measured(KEY, where, boxes, tuple(logical.shape), measure(local, logical, boxes))]
        for rank, (where, boxes, local) in enumerate(ranks)
    }
    [verdict] = judge([(KEY, tuple(logical.shape))], of_ranks(measured), limits, EPS)
    return verdict


TOLERANCE = 0.02


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


@given(candidates())
def test_half_the_tolerance_on_every_rank_is_never_flagged(candidate):
    """Each rank's part is off by 0.5 x tolerance of itself: rounding, not a bug."""
    logical, ranks, generator = candidate
    for _, _, local in ranks:
        noise = torch.randn(local.shape, generator=generator, dtype=torch.float64)
        noise *= 0.5 * TOLERANCE * float(local.double().norm()) / float(noise.norm())
        local.copy_((local.double() + noise).to(local.dtype))
    assert judged(logical, ranks, TOLERANCE).verdict is Outcome.PASS
