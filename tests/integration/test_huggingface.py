# SPDX-License-Identifier: Apache-2.0
"""Megatron's models against those of Hugging Face's transformers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.saved import api
from megatron_ttrace.saved.huggingface import comparison
from megatron_ttrace.trace import budget
from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.records import Outcome
from tests.integration.jobs import ROOT, SCRIPT, ttrace
from tests.saved.huggingface.jobs import BESIDE, EP, TWINS, arguments, needs_transformers

pytestmark = needs_transformers
TWIN = TWINS["qwen3_moe"]


def command(*words: object, cwd: Path, code: int = 0) -> Any:
    """What ``ttrace`` prints, as JSON, where transformers can be imported."""
    path = os.pathsep.join([str(ROOT), BESIDE])
    return json.loads(ttrace(*words, cwd=cwd, PYTHONPATH=path, code=code).stdout)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A job in bf16 with an auxiliary loss, checked against its model of transformers."""
    home = tmp_path_factory.mktemp("checked")
    TWIN.write(home / "model", num_hidden_layers=3)
    job = arguments(TWIN, ("--bf16", "--moe-aux-loss-coeff", "0.01", *EP))
    check = ("check", "--json", "--nproc-per-node", 2, "--ttrace-no-wandb", "--ttrace-seeds", 2)
    return home, command(*check, "--against", "hf:model", "--", SCRIPT, *job, cwd=home)


def test_a_job_and_its_model(
    checked: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself, and the same job in float32, without the loss, against transformers.

    Where memory is short, models are compared layer by layer, and have the same culprit.
    """
    home, (own, other) = checked
    assert own["config"]["dtype"] == "bf16"
    assert other["config"]["against"]["model"].startswith("transformers' Qwen3MoeForCausalLM 5.")
    assert other["counts"]["pass"] > 200
    first = other["notices"][0]
    assert first == "the reference is that of the same job without --bf16 --moe-aux-loss-coeff 0.01"
    assert "num_hidden_layers is the trace's 2, not 3" in other["notices"]
    assert (home / "ttrace-out" / "huggingface" / "report.html").exists()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), BESIDE]))
    monkeypatch.setattr(comparison, "version", lambda: "5")
    monkeypatch.setattr(budget, "host_room", lambda ranks: 1 << 20)
    config = TWIN.write(tmp_path, norm_topk_prob=False)
    trace = home / "ttrace-out" / "float32"
    report = api.diff(f"hf:{config}", trace, output=tmp_path / "layers")
    assert any("layer by layer" in text for text in report.summary.notices)
    found = report.culprits[0]
    assert (found.name, found.cause) == ("decoder.layers.0.mlp.router", None)
    assert found.explanation == "unknown"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "norm_topk_prob": False},
            "rotary_pos_emb",
        ),
        ({"rope_theta": 20000.0}, "rotary_pos_emb"),
        ({"norm_topk_prob": False}, "decoder.layers.0.mlp.router"),
        ({"rms_norm_eps": 1e-6}, "decoder.layers.0.self_attention.linear_qkv"),
    ],
)
def test_another_model(
    checked: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    fields: dict[str, Any],
    culprit: str,
) -> None:
    """The first module that differs is named; causes would be those of parallel training."""
    TWIN.write(tmp_path, **fields)
    trace = checked[0] / "ttrace-out" / "float32"
    document = command("diff", "--json", "hf:config.json", trace, cwd=tmp_path, code=1)
    assert not any("layer by layer" in text for text in document["notices"])
    first = document["culprits"][0]
    assert first["name"] == culprit
    assert first["cause"] is None
    assert first["explanation"] == "unknown"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "more"),
    [("deepseek_v3", ("--mtp-num-layers", "1")), ("nemotron_h-latent", ()), ("gpt_oss", ())],
)
def test_families(name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """Models with rows of their own are the same; layers that only Megatron trains are left out."""
    twin = TWINS[name]
    twin.write(tmp_path / "model")
    command(
        *("check", "--json", "--ttrace-no-wandb", "--ttrace-seeds", 2, "--against", "hf:model"),
        *("--", launch_dir() / twin.script, *arguments(twin, more, length=160)),
        cwd=tmp_path,
    )
    summary, verdicts = load_report(tmp_path / "ttrace-out" / "huggingface")
    assert (" ".join(("without", *more)) in summary.notices[0]) is bool(more)
    assert {verdict.name for verdict in verdicts if verdict.verdict is Outcome.PASS} > {
        "decoder.layers.1.self_attention.core_attention",
        "decoder.layers.0.mixer.norm" if "nemotron" in name else "decoder.layers.1.mlp.router",
    }
