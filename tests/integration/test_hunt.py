# SPDX-License-Identifier: Apache-2.0
"""``ttrace hunt``: what a diverging job needs, and combinations around a healthy one."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, ttrace

BUG = ("--ttrace-bug", "11")


def hunt(folder: Path, *words: object, timeout: float = 800, **more: str) -> dict:
    """What it says, and its exit code."""
    done = ttrace("hunt", "--json", *words, cwd=folder, timeout=timeout, **more)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout) | {"code": done.returncode}


@pytest.mark.nightly
def test_combinations(tmp_path: Path) -> None:
    """Some are checked and written; the same command goes on with them."""
    words = ("--minutes", "0.02", "--max-ranks", "2", "--seed", "4")
    first = hunt(tmp_path, *words)
    assert first["combinations"][0]["values"] == {}
    assert first["combinations"][0]["answer"] == "equivalent"
    assert first["failures"] == []
    (file,) = (tmp_path / "ttrace-out-hunt").glob("jobs.jsonl")
    rows = file.read_text().splitlines()
    again = hunt(tmp_path, *words)
    assert file.read_text().splitlines()[: len(rows)] == rows
    # What is known is not checked again, however far it comes in its time.
    keys = [json.loads(row)["key"] for row in file.read_text().splitlines()]
    assert len(set(keys)) == len(keys)
    assert again["combinations"]
    page = (tmp_path / "ttrace-out-hunt" / "hunt.html").read_text()
    assert f"<h1>{len(again['combinations'])} combination" in page
    assert "--sequence-parallel" in page


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_what_a_job_needs(tmp_path: Path) -> None:
    """A bug of the sequence-parallel layer norm needs tensor parallelism, and nothing else."""
    job = (
        *("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2),
        *("--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    )
    found = hunt(tmp_path, "--", "torchrun", "--nproc-per-node", 8, SCRIPT, *TINY, *job, *BUG)
    assert found["code"] == 1
    (failure,) = found["failures"]
    assert failure["axes"] == {"tp": 2}
    assert "--sequence-parallel" in failure["flags"]
    assert "--overlap-grad-reduce" in failure["left out"]
    assert "--sequence-parallel" not in failure["healthy"]
