# SPDX-License-Identifier: Apache-2.0
"""The action and the template are well formed, and give ``ttrace ci`` what it knows."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ttrace.cli.main import build_parser

FOLDER = Path(__file__).parents[2] / "launch" / "pull-request"
KEPT = {
    "ttrace-ci/data",
    "ttrace-ci/references",
    "ttrace-ci/reached.json",
    "ttrace-ci/.ttrace-files-*",
}


def read(name: str) -> Any:
    """A file of the folder."""
    return yaml.safe_load((FOLDER / name).read_text())


def arguments(script: str, **variables: str) -> list[str]:
    """What a shell makes of the command that follows ``ttrace``, and the parser accepts."""
    echo = script.partition(" > ")[0].replace("ttrace ci", "printf '%s\\n' ci", 1)
    done = subprocess.run(
        ["bash", "-euc", echo], env=variables, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    build_parser().parse_args(words)
    return words


@pytest.mark.parametrize("recipes", ["", "my recipes"])
def test_the_commands(recipes: str) -> None:
    """With recipes of the fork's own, or none."""
    (check,) = (one for one in read("action.yml")["runs"]["steps"] if one.get("name") == "Check")
    own = shlex.split(f"--recipes '{recipes}'") if recipes else []
    expected = ["ci", ".", "--base", "abc", *own, "--max-ranks", "4", "--format"]
    github = arguments(check["run"], BASE="abc", RECIPES=recipes, RANKS="4")
    assert github == [*expected, "github"]
    (script,) = (one for one in read("gitlab.yml")["ttrace"]["script"] if "ttrace ci" in one)
    given = {"TTRACE_RECIPES": recipes, "TTRACE_MAX_RANKS": "4"}
    for base in ("CI_MERGE_REQUEST_DIFF_BASE_SHA", "CI_COMMIT_BEFORE_SHA"):
        assert arguments(script, **given, **{base: "abc"}) == [*expected, "gitlab"]


def test_the_action() -> None:
    """Restores before the check and saves after a failed one; no input is part of a script."""
    steps = read("action.yml")["runs"]["steps"]
    names = [step.get("name") for step in steps]
    at = names.index("Check")
    assert names.index("Restore references") < at < names.index("Save references")
    assert all(step["if"].startswith("always()") for step in steps[at + 1 :])
    save = steps[names.index("Save references")]["if"]
    assert save == "always() && github.event_name == 'push'"
    for step in steps:
        assert "${{" not in step.get("run", "")
        assert not step.get("run") or step["shell"] == "bash"
    paths = [step["with"]["path"].split() for step in steps if "cache" in step.get("uses", "")]
    assert [set(one) for one in paths] == [KEPT, KEPT]


def test_the_template() -> None:
    """Everything is kept of a failed job, and the whole history is there."""
    job = read("gitlab.yml")["ttrace"]
    assert job["variables"]["GIT_DEPTH"] == "0"
    assert set(job["cache"]["paths"]) == KEPT
    assert job["artifacts"]["when"] == job["cache"]["when"] == "always"
    (report,) = (re.search(r"> (\S+)", one) for one in job["script"] if "ttrace ci" in one)
    assert report
    assert job["artifacts"]["reports"]["codequality"] == report[1]
