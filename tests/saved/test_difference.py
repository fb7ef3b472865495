# SPDX-License-Identifier: Apache-2.0
"""Two runs that were kept, made by hand, against each other."""

import dataclasses
import json
import shutil

import pytest
import torch

from megatron_ttrace.compare.judge import verdict_of
from megatron_ttrace.report import wording
from megatron_ttrace.saved import api
from megatron_ttrace.saved.difference import Review
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import ROOT, Kind, Outcome, Result, TraceKey
from megatron_ttrace.trace.sealing import seal_json
from megatron_ttrace.trace.store import META
from tests.run import kept


@pytest.fixture
def a(tmp_path):
    """A run on two ranks."""
    return kept.run(tmp_path / "a", kept.tensors())


def by_key(report):
    """Verdicts by key."""
    return {verdict.key: verdict for verdict in report.verdicts}


def test_another_layout(tmp_path, a):
    """The same tensors on four ranks: all are compared, both ways."""
    b = kept.run(tmp_path / "b", kept.tensors(), ranks=4)
    for first, second in ((a, b), (b, a), (a / "reference", b), (b, a / "candidate")):
        report = api.diff(first, second, output=tmp_path / "out")
        assert report.verdict is Result.EQUIVALENT
        assert [verdict.verdict for verdict in report.verdicts] == [Outcome.PASS] * 2
        assert str(first.name) in report.summary.notices[0]
        sizes = {a: "tp 2, 2 ranks", b: "tp 4, 4 ranks", a / "reference": "1 device"}
        sizes |= {a / "candidate": sizes[a]}
        shown = wording.layout_text(report.summary.config)
        assert shown == f"{sizes[second]}, against {sizes[first]}"


def test_a_difference_that_neither_reference_has(tmp_path, a):
    """Each run is its own reference's equal; they are not each other's."""
    changed = kept.tensors()
    changed[kept.GRADIENT] = changed[kept.GRADIENT] * 1.5
    b = kept.run(tmp_path / "b", changed)
    report = api.diff(a, b, output=tmp_path / "out")
    assert report.verdict is Result.DIVERGED
    assert [verdict.key for verdict in report.failures()] == [kept.GRADIENT]
    assert report.culprits[0].name == "decoder.layers.0.mlp.linear_fc1"


@pytest.mark.parametrize("first", ["coarse", "fine"])
def test_the_larger_tolerance_counts(tmp_path, first):
    """A run in a coarser arithmetic rounds more, whichever side it is."""
    near = {key: value * (1 + 1e-3) for key, value in kept.tensors().items()}
    sides = {
        "fine": kept.run(tmp_path / "fine", kept.tensors()),
        "coarse": kept.run(tmp_path / "coarse", near, moved=1e-3),
    }
    second = ({*sides} - {first}).pop()
    assert api.diff(sides[first], sides[second], output=tmp_path / "out").is_equivalent


def test_a_trace_without_its_reference(tmp_path, a):
    """The other side's replays give the tolerances; without any there are none."""
    b = kept.run(tmp_path / "b", kept.tensors())
    shutil.rmtree(a / "reference")
    assert api.diff(a, b, output=tmp_path / "out").is_equivalent
    shutil.rmtree(b / "reference")
    with pytest.raises(TTraceError, match="no tolerances: keep one"):
        api.diff(a, b, output=tmp_path / "out")


def test_a_reference_with_other_start_values(tmp_path):
    """It has no candidate that says so; nothing can be concluded from the comparison."""
    runs = [kept.run(tmp_path / init, kept.tensors(), init=init) for init in ("reveal", "megatron")]
    for compare in (api.compare, api.diff):
        with pytest.raises(TTraceError, match="differ in start values: reveal and megatron"):
            compare(runs[0] / "reference", runs[1] / "candidate", output=tmp_path / "out")
        same = compare(runs[0] / "reference", runs[0] / "candidate", output=tmp_path / "out")
        assert same.is_equivalent


def test_other_seeds(tmp_path, a):
    """Start values and the order of the data follow from the seed."""
    b = kept.run(tmp_path / "b", kept.tensors(), seed=7)
    with pytest.raises(TTraceError, match="differ in --seed: 1234 and 7"):
        api.diff(a, b, output=tmp_path / "out")


def test_what_one_run_lacks_is_named(tmp_path, a):
    """A kind, or a name, that only one has is unchecked; a single tensor is a failure."""
    more = kept.tensors()
    more[TraceKey(1, -1, Kind.EXP_AVG, kept.GRADIENT.name)] = torch.ones(4, 4)
    more[TraceKey(1, 0, Kind.OUTPUT, "decoder.extra")] = torch.ones(4, 4)
    b = kept.run(tmp_path / "b", more)
    for first, second in ((a, b), (b, a)):
        report = api.diff(first, second, output=tmp_path / "out", allow_unchecked=1.0)
        assert report.verdict is Result.EQUIVALENT
        reasons = [
            verdict.reason for verdict in report.verdicts if verdict.verdict is Outcome.UNCHECKED
        ]
        assert reasons == [Reason.ONE_RUN] * 2
        notices = " / ".join(report.summary.notices)
        assert "exp_avg" in notices
        assert "decoder.extra" in notices
    more[dataclasses.replace(kept.OUTPUT, microbatch=1)] = torch.ones(4, 4)
    report = api.diff(a, kept.run(tmp_path / "c", more), output=tmp_path / "out")
    assert [verdict.verdict for verdict in report.failures()] == [Outcome.EXTRA]


def test_a_known_difference(tmp_path, a):
    """It is not a failure between these versions, and is reported with its reason."""
    changed = kept.tensors()
    changed[kept.OUTPUT] = -changed[kept.OUTPUT]
    listed = tmp_path / "known.toml"
    table = '[[difference]]\nname = "*.mlp"\nbetween = ["0.18", "0.19"]\nreason = "our fix"\n'
    listed.write_text(table)
    for version, result in (("0.18.2", Result.EQUIVALENT), ("0.20.0", Result.DIVERGED)):
        b = kept.run(tmp_path / version, changed, version=version)
        report = api.diff(a, b, output=tmp_path / "out", known=listed, allow_unchecked=0.5)
        assert report.verdict is result
    b = tmp_path / "0.18.2"
    report = api.diff(a, b, output=tmp_path / "out", known=listed, allow_unchecked=0.5)
    assert by_key(report)[kept.OUTPUT].reason is Reason.KNOWN
    assert by_key(report)[kept.OUTPUT].note == "known difference: our fix"
    assert any("our fix" in notice for notice in report.summary.notices)
    assert api.diff(a, b, output=tmp_path / "out", known=listed).verdict is Result.COULD_NOT_CHECK


def test_other_parameters(tmp_path):
    """Runs whose parameters have other names start from other values: there is no answer."""
    usual = kept.tensors()
    renamed = {**usual, kept.OUTPUT: usual[kept.OUTPUT] * 2}
    for name, tensors in (("norm.weight", usual), ("fused.norm_weight", renamed)):
        tensors[TraceKey(1, -1, Kind.PARAM, name)] = torch.ones(2, 2)
        kept.run(tmp_path / name, tensors)
    sides = tmp_path / "norm.weight", tmp_path / "fused.norm_weight"
    report = api.diff(*sides, output=tmp_path / "out")
    assert report.verdict is Result.COULD_NOT_CHECK
    assert by_key(report)[kept.OUTPUT].reason is Reason.OTHER_START
    assert "fused.norm_weight" in " / ".join(report.summary.notices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 2}, r"train on different batches \(1 and 2 microbatches a step\)"),
        ({"samples": 4}, r"train on different batches \(2 and 4 samples a microbatch\)"),
        ({"init": "megatron"}, "differ in start values"),
        ({"isolate": True}, "share a reference"),
    ],
)
def test_runs_that_cannot_be_compared(tmp_path, a, options, message):
    """The reason is reported before anything is compared."""
    b = kept.run(tmp_path / "b", kept.tensors(), **options)
    with pytest.raises(TTraceError, match=message):
        api.diff(a, b, output=tmp_path / "out")


def test_another_padded_vocabulary(tmp_path):
    """Real rows are compared; the loss and what follows from it differ by design."""
    rows = torch.randn(8, 2)
    logits = TraceKey(1, 0, Kind.OUTPUT, "output_layer")

    def side(name, size, embedding=rows):
        tensors = {**kept.tensors(), kept.EMBEDDING: embedding[:size], logits: rows[:size].t()}
        tensors[kept.GRADIENT] = tensors[kept.GRADIENT] * size
        return kept.run(tmp_path / name, tensors)

    for first, second in ((side("4", 4), side("8", 8)), (side("6", 6), side("2", 2))):
        report = api.diff(first, second, output=tmp_path / "out", allow_unchecked=0.5)
        assert report.verdict is Result.EQUIVALENT
        verdicts = by_key(report)
        assert verdicts[kept.EMBEDDING].verdict is verdicts[logits].verdict is Outcome.PASS
        assert verdicts[kept.GRADIENT].reason is Reason.PADDED
        assert any("padded to" in notice for notice in report.summary.notices)
    other = rows.clone()
    other[1] += 1
    report = api.diff(side("a", 4), side("b", 8, other), output=tmp_path / "out")
    assert [verdict.key for verdict in report.failures()] == [kept.EMBEDDING]


@pytest.mark.parametrize("are_same", [True, False])
def test_ids_that_were_spread_over_other_vocabularies(are_same):
    """Then nothing is the same that is computed from them."""
    ids = TraceKey(1, 0, Kind.INPUT, ROOT)
    outcomes = {ids: Outcome.PASS if are_same else Outcome.DIVERGED, kept.OUTPUT: Outcome.DIVERGED}
    review = Review.__new__(Review)
    review._padded, review._left_out = (4, 8), {}
    review._known, review._other_start = [], False
    verdicts = review([verdict_of(key, (1, 4), found, []) for key, found in outcomes.items()])
    expected = [None, None] if are_same else [Reason.PADDED] * 2
    assert [verdict.reason for verdict in verdicts] == expected


def test_another_version(tmp_path, a):
    """A configuration with what this version does not know is an error that names the trace."""
    b = kept.run(tmp_path / "b", kept.tensors(), ranks=4)
    meta = b / "candidate" / META
    document = json.loads(meta.read_text())
    document["config"]["own_shards"] = ["new kind"]
    meta.write_text(seal_json(document))
    candidate = b / "candidate"
    pairs = ((api.diff, a, b), (api.diff, b, a), (api.compare, b / "reference", candidate))
    for compare, first, second in pairs:
        with pytest.raises(TTraceError, match=r"b/candidate/meta\.json .*own_shards"):
            compare(first, second, output=tmp_path / "out")


def test_two_references(tmp_path, a):
    """Neither is a run."""
    b = kept.run(tmp_path / "b", kept.tensors())
    with pytest.raises(TTraceError, match="two references"):
        api.diff(a / "reference", b / "reference", output=tmp_path / "out")
