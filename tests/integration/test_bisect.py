# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted in a history of Megatron, or appear in one layout only, are found."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import TINY, ttrace
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
        code=0,
    )
    found = json.loads(done.stdout)
    assert found["commit"] == git(root, "rev-parse", f"HEAD~{COMMITS - FAULT}")
    assert found["checked"] <= 7
    assert found["culprits"][0]["name"].endswith(("linear_qkv", "linear_fc1"))
    assert "+     output = output * 1.01" in found["lines"][0]
