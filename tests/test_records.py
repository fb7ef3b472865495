# SPDX-License-Identifier: Apache-2.0
"""The records survive JSON, and their fields are the contract's."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.records import (
    STEP_LEVEL,
    Culprit,
    Direction,
    Exactness,
    Kind,
    Outcome,
    Result,
    Summary,
    TraceKey,
    Verdict,
)
from megatron_ttrace.unexercised import NotExercised, Unexercised

numbers = st.none() | st.floats(allow_nan=False)
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
    ),
    unexercised=st.lists(
        st.builds(
            NotExercised,
            what=st.sampled_from(Unexercised),
            value=st.none() | st.floats(0, 1e9),
            names=st.lists(st.text(max_size=5), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)


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


def test_the_contracts_fields():
    """``verdicts.jsonl``: names and order that others read."""
    assert [field.name for field in dataclasses.fields(Verdict)] == (
        "iteration microbatch kind name index verdict rel_err rel_err_eps tolerance margin "
        "ranks placement shape note"
    ).split()
    summary = Summary(Result.EQUIVALENT, {}, (), {}, {}, {}).to_json()
    assert {"verdict", "counts", "culprits", "config", "versions", "timings"} <= set(summary)
    assert summary["not_exercised"] == []
    fields = {field.name for field in dataclasses.fields(Culprit)}
    assert {"name", "kind", "direction", "reason", "explanation"} <= fields


def test_the_contracts_words():
    """Kinds and verdicts by the names that reports and programs use."""
    assert {kind.value for kind in Kind} == set(
        "input output grad_output grad_input main_grad param param_delta exp_avg exp_avg_sq "
        "buffer routing loss grad_norm tokens initial".split()
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
    "change", [{"kind": "nonsense"}, {"verdict": "nonsense"}, {"rel_err": "words"}]
)
def test_a_foreign_line_is_refused(change):
    """Never half a verdict."""
    verdict = Verdict(1, 0, Kind.LOSS, "a", 0, Outcome.PASS, *[math.inf] * 4, (), "", (), "")
    line = {**verdict.to_json(), **change}
    with pytest.raises(ValueError):  # noqa: PT011 - the words are Python's
        Verdict.from_json(line)
    del line["name"]
    with pytest.raises((KeyError, ValueError)):
        Verdict.from_json(line)
