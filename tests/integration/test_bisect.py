# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted in a history of Megatron, or appear in one layout only, are found."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, ttrace
from tests.integration.test_checkout import make_checkout, plant
from tests.jobs.processes.test_worktrees import git

COMMITS = 64
FAULT = 23


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_commit(tmp_path: Path) -> None:
    """One of 64 commits scales the output of column-parallel layers."""
    root = tmp_path / "checkout"
    make_checkout(root)
    git(root, "init", "-q", "-b", "main")
    for number in range(COMMITS + 1):
        (root / "megatron" / "core" / "NUMBER").write_text(f"{number}\n")
        if number == FAULT:
            plant(root)
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", f"change {number}")
    words = ("--tensor-model-parallel-size", 2)
    done = ttrace(
        *("bisect", "--json", f"HEAD~{COMMITS}", "HEAD", "--", "torchrun", "--nproc-per-node", 2),
        *(root / "pretrain_gpt.py", *TINY, *words),
        cwd=tmp_path,
        timeout=1700,
        cold=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["commit"] == git(root, "rev-parse", f"HEAD~{COMMITS - FAULT}")
    assert found["checked"] <= 7
    assert found["culprits"][0]["name"].endswith(("linear_qkv", "linear_fc1"))
    assert "+            output = output * 1.01" in found["lines"][0]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_axes(tmp_path: Path) -> None:
    """A bug of the sequence-parallel layer norm needs tensor parallelism, and nothing else."""
    job = (
        *("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2),
        *("--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce"),
        *("--ttrace-bug", "11"),
    )
    done = ttrace(
        *("bisect", "--axes", "--json", "--", "torchrun", "--nproc-per-node", 8, SCRIPT, *TINY),
        *job,
        cwd=tmp_path,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["axes"] == {"tp": 2}
    assert "--sequence-parallel" in found["flags"]
    assert "--overlap-grad-reduce" in found["left out"]
