# SPDX-License-Identifier: Apache-2.0
"""Recipes are found in source; what needs Bridge itself is skipped without it."""

import json

import pytest

from megatron_ttrace.cli.main import main
from megatron_ttrace.cpu import bridge
from megatron_ttrace.evaluation.recipes import run
from megatron_ttrace.evaluation.recipes.bridge import discover, driver
from megatron_ttrace.evaluation.recipes.bridge.driver import Planned
from megatron_ttrace.evaluation.recipes.collect import Answer, Recipe, SmallJob
from megatron_ttrace.trace import codec
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

    def planned(name, answer=None, why="", digests=()):
        jobs = tuple(SmallJob("driver.py", (name, digest), 2, ()) for digest in digests)
        return Planned(Recipe(f"m:{name}", jobs, answer, why), digests)

    plans = [
        planned("first", digests=("a", "b")),
        planned("second", digests=("a",)),
        planned("third", Answer.HUB, "its processor"),
        planned("fourth", Answer.REFUSED, "not for this model"),
    ]
    wanted = [*(plan.recipe.name for plan in plans), "m:crashes"]
    monkeypatch.setattr(discover, "folder", lambda: tmp_path)
    monkeypatch.setattr(discover, "functions", lambda place: wanted)
    monkeypatch.setattr(discover, "_planned", lambda *_: {p.recipe.name: p for p in plans})
    recipes = discover.collect((), 8)
    assert recipes[1].jobs == recipes[0].jobs[:1]
    assert recipes[0].name == "m/first"
    answers = [row.answer for row in run.coverage(recipes, {})]
    assert answers == [None, None, Answer.HUB, Answer.REFUSED, Answer.COULD_NOT_CHECK]


def test_a_plan_is_read_as_it_was_written(monkeypatch):
    """Its jobs run the driver with the recipe's name."""
    for owner, name, value in (
        (driver, "build", None),
        (driver, "make_small", None),
        (driver, "_digest", "a"),
        (driver.sizes, "words", ["--num-layers", "4"]),
        (driver.sizes, "divisible", []),
    ):
        monkeypatch.setattr(owner, name, lambda *_, value=value: value)
    planned = driver._planned("m:first", 8)
    assert codec.decode(Planned, json.loads(json.dumps(codec.encode(planned)))) == planned
    (job,) = planned.recipe.jobs
    assert (job.script, job.arguments[:2]) == (str(discover.SCRIPT), ("--recipe", "m:first"))


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
