# SPDX-License-Identifier: Apache-2.0
"""Which tensors of which layouts must be bitwise equal, as a table; and what becomes of a loss."""

import dataclasses

import pytest

from megatron_ttrace.compare.exactness import Arithmetic, examine, must_be_equal
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.records import STEP_LEVEL, Exactness, Kind, Outcome, TraceKey
from tests.report.synthetic_report import make_judged

FC1 = "decoder.layers.0.mlp.linear_fc1"
OUT = TraceKey(1, 0, Kind.OUTPUT, FC1)
GRAD = TraceKey(1, 0, Kind.GRAD_INPUT, FC1)
LOSS = TraceKey(1, STEP_LEVEL, Kind.LOSS, "lm loss")
MAIN = TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, f"{FC1}.weight")
TIED = TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, "embedding.word_embeddings.weight")
NORM = TraceKey(1, STEP_LEVEL, Kind.GRAD_NORM, "grad_norm")
DELTA = TraceKey(1, STEP_LEVEL, Kind.PARAM_DELTA, f"{FC1}.weight")
TIED_DELTA = dataclasses.replace(TIED, kind=Kind.PARAM_DELTA)
AFTER = TraceKey(1, STEP_LEVEL, Kind.PARAM, f"{FC1}.weight", 1)
LOGGED = TraceKey(1, STEP_LEVEL, Kind.METRIC, "params-norm")
EVERYTHING = (OUT, GRAD, LOSS, MAIN, TIED, NORM, DELTA, TIED_DELTA, AFTER, LOGGED)

NOT_BITWISE = Note(Remark.NOT_BITWISE)


@pytest.mark.parametrize(
    ("job", "exact"),
    [
        # One rank, recomputation or not: the same work in the same order.
        ({}, EVERYTHING),
        ({"shared_embedding": True, "per_rank_state": True}, EVERYTHING),
        # A pipeline adds up nothing but norms, with one of which it clips.
        ({"pp": 2}, (OUT, GRAD, LOSS, MAIN, TIED)),
        ({"pp": 2, "clips": False}, (OUT, GRAD, LOSS, MAIN, TIED, DELTA, TIED_DELTA, AFTER)),
        # Tied embeddings: the first and the last stage sum their copies' gradients.
        ({"pp": 2, "shared_embedding": True}, (OUT, GRAD, LOSS, MAIN)),
        (
            {"pp": 4, "shared_embedding": True, "clips": False},
            (OUT, GRAD, LOSS, MAIN, DELTA, AFTER),
        ),
        # Replicas compute their microbatches whole, then add them up in another order.
        ({"dp": 2, "gradient_factor": 2.0}, (OUT, GRAD)),
        ({"dp": 4, "pp": 2, "clips": False, "gradient_factor": 4.0}, (OUT, GRAD)),
        ({"dp": 3, "gradient_factor": 3.0}, (OUT,)),
        ({"dp": 3, "gradient_factor": 1.0}, (OUT, GRAD)),
        # These cut matrix products or sums.
        ({"splits_sums": ("tp",)}, ()),
        ({"splits_sums": ("tp", "cp"), "pp": 2}, ()),
        ({"splits_sums": ("ep",), "dp": 2}, ()),
        # Not known, or known to differ.
        ({"pp": 2, "per_rank_state": True}, ()),
        ({"pp": 2, "deterministic": False}, ()),
        ({"same_code": False}, ()),
    ],
)
def test_the_rule(job, exact):
    arithmetic = Arithmetic(**job)
    assert {key for key in EVERYTHING if must_be_equal(key, arithmetic)} == set(exact)


@pytest.mark.parametrize(
    ("job", "exact"),
    [
        ({}, True),
        ({"pp": 2}, False),
        ({"pp": 2, "clips": False}, True),
        ({"pp": 2, "clips": False, "shared_embedding": True}, False),
        ({"dp": 2}, False),
    ],
)
def test_a_later_step_starts_from_the_updates_of_the_one_before(job, exact):
    """Its activations are exact only where those updates are."""
    assert must_be_equal(OUT, Arithmetic(**job), later=True) == exact


def test_a_loss_is_named_and_stays_a_pass():
    """Noted on the verdict, counted, the first one named."""
    good = make_judged("a", rel_err=0.0)
    lost = make_judged("b", rel_err=1e-9, ranks=(1,))
    notes = (Note(Remark.REPLICAS_ROUNDED, ranks=(0, 1)),)
    second = make_judged("c", rel_err=1e-9, notes=notes)
    noted, found = examine([good, lost, second], Arithmetic(pp=2))
    assert [v.verdict for v in noted] == [Outcome.PASS] * 3
    assert [v.notes for v in noted] == [(), (NOT_BITWISE,), (*second.notes, NOT_BITWISE)]
    assert found == Exactness(3, 2, str(lost.key), (1,), 1e-9)


def test_what_need_not_be_equal_is_not_counted():
    """Reordered tensors, unmeasured ones, start values."""
    verdicts = [
        make_judged("w", Kind.GRAD_NORM, microbatch=STEP_LEVEL, rel_err=1e-9),
        make_judged("m", rel_err=None, tolerance=None, verdict=Outcome.MISSING),
        make_judged("t", Kind.TOKENS, rel_err=0.5),
        make_judged("p", Kind.PARAM, microbatch=STEP_LEVEL, rel_err=0.5),
    ]
    noted, found = examine(verdicts, Arithmetic(pp=2))
    assert noted == verdicts
    assert found == Exactness(0, 0)


@pytest.mark.parametrize(
    ("error", "outcome", "lost"), [(0.5, Outcome.DIVERGED, 1), (1.35e-44, Outcome.PASS, 0)]
)
def test_what_gets_no_note(error, outcome, lost):
    """What diverged, which counts all the same, and numbers too small to be halved exactly."""
    verdict = make_judged(rel_err=error, verdict=outcome)
    noted, found = examine([verdict], Arithmetic(dp=2, gradient_factor=2.0))
    assert (noted, found.expected, found.lost) == ([verdict], 1, lost)


def test_a_trace_that_does_not_say():
    """Nothing is expected of a candidate whose arithmetic is not told."""
    verdicts = [make_judged(rel_err=1e-9)]
    assert examine(verdicts, None) == (verdicts, None)
