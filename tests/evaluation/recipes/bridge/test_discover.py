# SPDX-License-Identifier: Apache-2.0
"""Recipes are found in source; what needs Bridge itself is skipped without it."""

import json

import pytest

from megatron_ttrace.cli.main import main
from megatron_ttrace.cpu import bridge
from megatron_ttrace.evaluation.recipes import run
from megatron_ttrace.evaluation.recipes.bridge import discover
from megatron_ttrace.evaluation.recipes.bridge.discover import Planned, PlannedJob
from megatron_ttrace.evaluation.recipes.collect import Kind
from megatron_ttrace.trace.errors import ExitCode

SOURCE = """
def small_pretrain_1gpu_config() -> ConfigContainer: ...
def _common() -> ConfigContainer: ...
def quoted_sft_config() -> "ConfigContainer": ...
def default_squad_config() -> GPTSFTDatasetConfig: ...
"""


def test_functions_that_return_a_configuration(tmp_path):
    """Public ones, wherever they are; other packages' names are not looked at."""
    folder = tmp_path / "llama" / "h100"
    folder.mkdir(parents=True)
    (folder / "llama3.py").write_text(SOURCE)
    recipes = discover.functions(tmp_path)
    assert recipes == [
        "llama.h100.llama3:small_pretrain_1gpu_config",
        "llama.h100.llama3:quoted_sft_config",
    ]
    assert discover.title(recipes[0]) == "llama/small_pretrain_1gpu"


def test_plans_become_recipes(monkeypatch, tmp_path):
    """Equal configurations are one job; each reason for none has its row."""

    def planned(name, kind="TRAINING", why="", digests=()):
        jobs = tuple(PlannedJob(("--num-layers", "2"), 2, digest) for digest in digests)
        return Planned(f"m:{name}", kind, jobs, (), why)

    plans = [
        planned("first", digests=("a", "b")),
        planned("second", digests=("a",)),
        planned("third", "HUB", "its processor"),
        planned("fourth", "REFUSED", "not for this model"),
    ]
    wanted = [*(plan.name for plan in plans), "m:crashes"]
    monkeypatch.setattr(discover, "folder", lambda: tmp_path)
    monkeypatch.setattr(discover, "functions", lambda place: wanted)
    monkeypatch.setattr(discover, "_planned", lambda names, most: {p.name: p for p in plans})
    recipes = discover.collect((), 8)
    assert recipes[1].jobs == recipes[0].jobs[:1]
    assert recipes[0].jobs[0].arguments == ("--recipe", "m:first", "--num-layers", "2")
    assert [plan.kind for plan in recipes[2:]] == [Kind.HUB, Kind.REFUSED, Kind.NOT_SHRUNK]
    answers = [row.answer for row in run.coverage(recipes, {})]
    hub, refused, failed = run.Answer.HUB, run.Answer.REFUSED, run.Answer.COULD_NOT_CHECK
    assert answers == [None, None, hub, refused, failed]


def test_one_of_both_is_given(capsys):
    """A checkout or Bridge."""
    assert main(["recipes", "--dry-run"]) == ExitCode.COULD_NOT_CHECK
    assert "give either a checkout" in capsys.readouterr().err


@pytest.mark.skipif(not bridge.installed(), reason="make bridge installs it")
def test_a_recipe_of_bridge(tmp_path, capsys):
    """A published recipe for 8 GPUs, in two ranks."""
    words = ["recipes", "--bridge", "--only", "olmoe/*pretrain*", "--json"]
    assert main([*words, "--directory", str(tmp_path)]) == ExitCode.EQUIVALENT
    table = json.loads(capsys.readouterr().out)
    (row,) = table["recipes"]
    (job,) = table["jobs"].values()
    assert row["answer"] == "equivalent"
    assert job["ranks"] == 2
    assert job["tensors"] > 100
