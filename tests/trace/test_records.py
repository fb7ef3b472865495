# SPDX-License-Identifier: Apache-2.0
"""The records survive JSON, and their fields are the contract's."""

import dataclasses
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.collectives import Ledger
from megatron_ttrace.trace.meta import CandidateMeta, ReferenceMeta
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    Culprit,
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
from tests.trace.arbitrary import arbitrary

RECORDS = (Verdict, Culprit, Residual, Run, Summary, Ledger, ReferenceMeta, CandidateMeta)


@pytest.mark.parametrize("record", RECORDS)
@settings(
    max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
@given(data=st.data())
def test_records_survive(record, data):
    """Through strict JSON, infinities included."""
    value = data.draw(arbitrary(record))
    text = json.dumps(value.to_json(), allow_nan=False)
    assert record.from_json(json.loads(text)) == value


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
        "buffer routing dropout precision loss grad_norm tokens initial counted metric loaded "
        "hyperparameters".split()
    )
    assert {outcome.value for outcome in Outcome} == set(
        "pass diverged replica_conflict missing extra uncovered shape nonfinite unchecked".split()
    )


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
