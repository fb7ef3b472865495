# SPDX-License-Identifier: Apache-2.0
"""The records survive JSON, and their fields are the contract's."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.outcomes import NotExercised, Reason, Unexercised
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    Code,
    Culprit,
    Direction,
    Element,
    Exactness,
    Kind,
    Outcome,
    Residual,
    Result,
    Run,
    Summary,
    TraceKey,
    Verdict,
)
from tests.report.synthetic_report import culprit_of, make_verdict

numbers = st.none() | st.floats(min_value=0, allow_nan=False)
ranks = st.lists(st.integers(0, 2**20), max_size=4).map(tuple)
verdicts = st.builds(
    Verdict,
    iteration=st.integers(1, 10**6),
    microbatch=st.integers(STEP_LEVEL, 100),
    kind=st.sampled_from(Kind),
    name=st.text(max_size=20),
    index=st.integers(0, 9),
    verdict=st.sampled_from(Outcome),
    rel_err=numbers,
    rel_err_eps=numbers,
    tolerance=numbers,
    margin=numbers,
    ranks=ranks,
    placement=st.text(max_size=20),
    shape=ranks,
    note=st.text(max_size=20),
    reason=st.none() | st.sampled_from(Reason),
)
culprits = st.builds(
    Culprit,
    name=st.text(max_size=20),
    kind=st.sampled_from(Kind),
    direction=st.sampled_from(Direction),
    reason=st.text(max_size=20),
    explanation=st.text(max_size=20),
    iteration=st.integers(1, 9),
    microbatch=st.integers(STEP_LEVEL, 9),
    index=st.integers(0, 9),
    verdict=st.sampled_from(Outcome),
    ranks=ranks,
    rel_err=numbers,
    rel_err_eps=numbers,
    tolerance=numbers,
    margin=numbers,
    hint=st.text(max_size=20),
    where=st.text(max_size=20),
    cause=st.none() | st.sampled_from(Cause),
    axes=st.sampled_from([(), ("tp",), ("tp", "cp")]),
)
residuals = st.builds(
    Residual,
    key=st.builds(
        TraceKey,
        st.integers(1, 9),
        st.integers(STEP_LEVEL, 9),
        st.sampled_from(Kind),
        st.text(max_size=20),
        st.integers(0, 9),
    ),
    total=st.integers(0, 99),
    exact=st.integers(0, 99),
    lowest=st.integers(-99, 99),
    counts=ranks,
    worst=st.lists(
        st.builds(
            Element,
            index=ranks,
            reference=st.floats(allow_nan=False),
            candidate=st.floats(allow_nan=False),
            rank=st.integers(0, 99),
        ),
        max_size=2,
    ).map(tuple),
    boxes=st.lists(st.tuples(st.integers(0, 99), st.text(max_size=9)), max_size=2).map(tuple),
)
code = st.builds(
    Code,
    version=st.text(max_size=9),
    path=st.text(max_size=9),
    commit=st.text(max_size=9),
    dirty=st.booleans(),
)
runs = st.builds(
    Run,
    id=st.text("0123456789abcdef", min_size=16, max_size=16),
    command=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    script=st.text(max_size=9),
    script_sha256=st.text(max_size=9),
    megatron=code,
    ttrace=code,
    host=st.text(max_size=9),
    user=st.text(max_size=9),
    date=st.text(max_size=9),
    environment=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    seed=st.integers(-1, 2**32),
)
words = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
summaries = st.builds(
    Summary,
    verdict=st.sampled_from(Result),
    counts=st.dictionaries(st.sampled_from([o.value for o in Outcome]), st.integers(0, 9)),
    culprits=st.lists(culprits, max_size=2).map(tuple),
    config=words,
    versions=words,
    timings=st.dictionaries(st.text(max_size=5), st.floats(0, 1e9), max_size=3),
    execution_order=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    notices=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    exactness=st.none()
    | st.builds(
        Exactness,
        expected=st.integers(0, 99),
        lost=st.integers(0, 99),
        first=st.text(max_size=20),
        ranks=ranks,
        rel_err=numbers,
    ).filter(lambda one: not one.contradiction()),
    residuals=st.lists(residuals, max_size=2).map(tuple),
    run=st.none() | runs,
    not_exercised=st.lists(
        st.builds(
            NotExercised,
            what=st.sampled_from(Unexercised),
            value=st.none() | st.floats(0, 1e9),
            names=st.lists(st.text(max_size=5), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
).filter(lambda one: not one.contradiction())


@given(verdicts)
def test_verdicts_survive(verdict):
    """Through strict JSON, infinities included."""
    line = json.dumps(verdict.to_json(), allow_nan=False)
    assert Verdict.from_json(json.loads(line)) == verdict


@given(summaries)
def test_summaries_survive(summary):
    """With their culprits."""
    text = json.dumps(summary.to_json(), allow_nan=False)
    assert Summary.from_json(json.loads(text)) == summary


def test_an_older_summary_is_read():
    """Its culprits have no hint, no place to look at, and no cause."""
    names = "hint where cause axes"
    culprit = dataclasses.replace(culprit_of(make_verdict(), "", "unknown"), axes=())
    data = {name: value for name, value in culprit.to_json().items() if name not in names.split()}
    assert Culprit.from_json(data) == culprit


def test_the_contracts_fields():
    """``verdicts.jsonl``: names and order that others read."""
    assert [field.name for field in dataclasses.fields(Verdict)] == (
        "iteration microbatch kind name index verdict rel_err rel_err_eps tolerance margin "
        "ranks placement shape note reason"
    ).split()
    summary = Summary(Result.EQUIVALENT, {}, (), {}, {}, {}).to_json()
    assert {"verdict", "counts", "culprits", "config", "versions", "timings"} <= set(summary)
    assert summary["not_exercised"] == []
    fields = {field.name for field in dataclasses.fields(Culprit)}
    assert {"name", "kind", "direction", "reason", "explanation", "hint", "where"} <= fields


def test_the_contracts_words():
    """Kinds and verdicts by the names that reports and programs use."""
    assert {kind.value for kind in Kind} == set(
        "input output grad_output grad_input main_grad param param_delta exp_avg exp_avg_sq "
        "buffer routing loss grad_norm tokens initial counted metric loaded hyperparameters".split()
    )
    assert {outcome.value for outcome in Outcome} == set(
        "pass diverged replica_conflict missing extra uncovered shape nonfinite unchecked".split()
    )


def test_what_counts_as_a_failure():
    """All but a pass and what could not be checked."""
    fine = {outcome for outcome in Outcome if not outcome.is_failure}
    assert fine == {Outcome.PASS, Outcome.UNCHECKED}


@pytest.mark.parametrize(
    ("kind", "direction"),
    [
        (Kind.INITIAL, Direction.START),
        (Kind.TOKENS, Direction.START),
        (Kind.PARAM, Direction.START),
        (Kind.OUTPUT, Direction.FORWARD),
        (Kind.LOSS, Direction.FORWARD),
        (Kind.GRAD_INPUT, Direction.BACKWARD),
        (Kind.MAIN_GRAD, Direction.GRADIENT),
        (Kind.GRAD_NORM, Direction.GRADIENT),
        (Kind.COUNTED, Direction.GRADIENT),
        (Kind.METRIC, Direction.UPDATE),
        (Kind.EXP_AVG_SQ, Direction.UPDATE),
    ],
)
def test_directions(kind, direction):
    """Where in a step a tensor of this kind is made."""
    assert kind.direction is direction


def test_every_kind_has_a_direction():
    """A new kind cannot be forgotten."""
    assert all(isinstance(kind.direction, Direction) for kind in Kind)


def test_keys_in_words():
    """Step-level tensors have no microbatch."""
    key = TraceKey(3, 2, Kind.OUTPUT, "decoder.layers.1.mlp", 1)
    assert str(key) == "decoder.layers.1.mlp output.1 (iteration 3 microbatch 2)"
    step = TraceKey(3, STEP_LEVEL, Kind.MAIN_GRAD, "w")
    assert str(step) == "w main_grad.0 (iteration 3)"
    assert sorted([key, step])


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "nonsense"},
        {"verdict": "nonsense"},
        {"rel_err": "words"},
        {"margin": -1.0},
        {"tolerance": "nan"},
        {"ranks": [-1]},
        {"ranks": [True]},
        {"ranks": "12"},
        {"shape": [1 << 63]},
        {"index": 1.0},
        {"name": None},
    ],
)
def test_a_foreign_line_is_refused(change):
    """Never half a verdict."""
    verdict = make_verdict("a", Kind.LOSS, rel_err=math.inf)
    line = {**verdict.to_json(), **change}
    with pytest.raises(CodecError):
        Verdict.from_json(line)
    line = verdict.to_json()
    del line["name"]
    with pytest.raises(CodecError, match="name: is missing"):
        Verdict.from_json(line)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"counts": {"diverged": 1}}, "equivalent, with 1 failures"),
        ({"counts": {"pass": -1}}, r"counts\['pass'\]: expected an integer"),
        ({"counts": {"fine": 1}}, "no outcome is called 'fine'"),
        ({"run": {"id": "x"}}, "run.command: is missing"),
        ({"exactness": {"expected": 1, "lost": 2}}, "exactness: 2 lost of 1"),
        ({"culprits": [{}]}, r"culprits\[0\].direction: is missing"),
        ({"config": []}, "config: expected an object, got a list of 0"),
    ],
)
def test_a_summary_that_cannot_be_true_is_refused(change, reason):
    """The message names the field."""
    data = Summary(Result.EQUIVALENT, {"pass": 1}, (), {}, {}, {}).to_json()
    with pytest.raises(CodecError, match=reason):
        Summary.from_json({**data, **change})


def test_verdicts_are_counted_by_outcome():
    """A summary of another run's verdicts is noticed although their number is the same."""
    verdict = make_verdict("a", Kind.LOSS)
    counted = Summary(Result.EQUIVALENT, {"pass": 1}, (), {}, {}, {})
    assert counted.disagreement([verdict]) == ""
    other = dataclasses.replace(verdict, verdict=Outcome.UNCHECKED)
    assert counted.disagreement([other]) == "0 verdicts are 'pass', 1 were counted"
