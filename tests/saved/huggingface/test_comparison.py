# SPDX-License-Identifier: Apache-2.0
"""A reference against a model of transformers, without running one."""

import dataclasses
import importlib.metadata
import os
from pathlib import Path

import pytest
import torch

from megatron_ttrace.compare.exercised import Requested
from megatron_ttrace.report import wording
from megatron_ttrace.saved import api
from megatron_ttrace.saved.huggingface import comparison
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.outcomes import Reason, Unexercised
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, Result, TraceKey
from tests.run import kept
from tests.saved.huggingface.jobs import TWINS

OUTPUT = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0")
NORM = TraceKey(1, STEP_LEVEL, Kind.PARAM, "decoder.layers.0.input_layernorm.weight")
MOMENT = TraceKey(1, STEP_LEVEL, Kind.EXP_AVG, "decoder.layers.0.input_layernorm.weight")
LATER = dataclasses.replace(OUTPUT, iteration=2)
EXPERT = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.mlp.experts.linear_fc1")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that compares a trace with a model that computes a tensor, times a factor."""
    monkeypatch.setattr(comparison, "version", lambda: "5.0")
    keys = (kept.EMBEDDING, NORM, OUTPUT, EXPERT, MOMENT, LATER)
    tensors = {key: torch.rand(128, 6) + 1 for key in keys}
    home = kept.run(tmp_path / "trace", tensors)
    config = TWINS["llama"].write(tmp_path / "model", num_hidden_layers=9)

    def compare(factor=1.0, computed=OUTPUT, requested=Requested(), **more):  # noqa: B008
        answer = {computed: tensors[computed] * factor}
        made = kept.run(tmp_path / "made", answer, ranks=1, requested=requested)

        def write(config: Path, reference: Path, directory: Path, *, by_layer: bool) -> None:
            assert reference == home / "reference"
            for path in (made / "candidate").iterdir():
                (directory / path.name).write_bytes(path.read_bytes())

        monkeypatch.setattr(comparison, "_run", write)
        return api.diff(f"hf:{config}", home, output=tmp_path / "out", **more)

    return compare


def test_the_same_model(run) -> None:
    """What has no counterpart is counted with its reason, and is not held against the answer."""
    report = run()
    assert report.verdict is Result.EQUIVALENT
    reasons = {v.key: v.reason for v in report.verdicts if v.verdict is Outcome.UNCHECKED}
    without_counterpart = (kept.EMBEDDING, NORM, EXPERT, MOMENT, LATER)
    assert reasons == dict.fromkeys(without_counterpart, Reason.NO_COUNTERPART)
    assert any(text.startswith("iteration 2 of the trace: ") for text in report.summary.notices)
    assert "LlamaForCausalLM 5.0, in float32" in report.summary.notices[0]
    assert "num_hidden_layers is the trace's 1, not 9" in report.summary.notices
    sentence = wording.result_text(report.summary)
    assert sentence == "computes the same as transformers' LlamaForCausalLM 5.0"


def test_a_different_model(run, tmp_path) -> None:
    """The module is named, and the answer is about the model; a known difference is none."""
    report = run(1.01)
    assert report.verdict is Result.DIVERGED
    assert [culprit.name for culprit in report.culprits] == [OUTPUT.name]
    assert wording.result_text(report.summary).startswith("differs from transformers' Llama")
    known = tmp_path / "known.toml"
    known.write_text('[[difference]]\nname = "decoder.*"\nreason = "our own norm"\n')
    report = run(1.01, known=known, allow_unchecked=1.0)
    assert not report.failures()
    assert "known difference, not judged: our own norm" in report.summary.notices
    known.write_text(known.read_text() + 'between = ["0.18", "0.19"]\n')
    assert run(1.01, known=known).verdict is Result.DIVERGED


def test_what_a_killed_comparison_leaves(run, tmp_path) -> None:
    """It is removed a day later; one that may be running stays, and somebody else's directory."""
    names = ("left", "running", "foreign")
    left, running, foreign = (tmp_path / "out" / f".against-{name}" for name in names)
    for home in (left, running):
        owned.make(home, whole=True)
        (home / "rank-00000.jsonl").write_text("cut off")
    foreign.mkdir()
    for home in (left, foreign):
        os.utime(home, (0, 0))
    assert run().verdict is Result.EQUIVALENT
    assert {*left.parent.glob(".against-*")} == {running, foreign}


def test_what_a_model_does_not_exercise(run) -> None:
    """Parallelism and updates were not asked of it; a window that hides nothing was."""
    features = run(requested=Requested(window=40, seq_length=32)).summary.not_exercised
    assert [feature.what for feature in features] == [Unexercised.WINDOW]


def test_a_counterpart_that_was_not_computed(run) -> None:
    """It is missing, not one of the tensors that only Megatron has."""
    report = run(computed=EXPERT)
    assert report.verdict is Result.DIVERGED
    assert [verdict.key for verdict in report.failures()] == [OUTPUT]
    assert report.failures()[0].verdict is Outcome.MISSING


def test_what_names_a_model(tmp_path, monkeypatch) -> None:
    """``hf:`` and a file or its folder; what cannot run is refused before the long work."""
    config = TWINS["llama"].write(tmp_path)
    monkeypatch.setattr(comparison, "version", lambda: "5.0")
    assert comparison.config_of(f"hf:{tmp_path}") == config
    assert comparison.config_of("before") is None
    assert api.is_model(f"hf:{config}")
    assert not api.is_model("torchrun train.py")
    with pytest.raises(TTraceError, match="is not a config"):
        api.is_model("hf:absent.json")
    monkeypatch.undo()

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(TTraceError, match=r"pip install 'megatron-ttrace\[hf\]'"):
        comparison.version()


def test_a_folder_without_a_reference(tmp_path) -> None:
    """It names what to give."""
    with pytest.raises(TTraceError, match="holds no reference"):
        comparison.open_reference(tmp_path)
