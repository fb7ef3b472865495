# SPDX-License-Identifier: Apache-2.0
"""The change to blame, in real checks of a fork of Megatron."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import TINY, ttrace
from tests.integration.test_checkout import FAULT, change, make_checkout, plant
from tests.jobs.processes.test_worktrees import commit, git


@pytest.mark.nightly
def test_a_fork(tmp_path: Path) -> None:
    """The fault, which is not committed, among changes of code that ran and of code that did not.

    The files of the fork are as they were, and the report is that of the fork. What is secret in
    the environment or the command is in no file but logs.
    """
    root = tmp_path / "tree"
    make_checkout(root)
    commit(root, "a release", "core_v0.19.2")
    change(root)
    commit(root, "changes")
    plant(root)
    before = git(root, "diff"), git(root, "status", "--porcelain")
    words = ["check", "--blame", "--once", "--nproc-per-node", 2, "--", "tree/pretrain_gpt.py"]
    words += [*TINY, "--tensor-model-parallel-size", 2]
    words += ["--wandb-entity", "https://u:hunter2hunter2@host"]
    done = ttrace(*words, cwd=tmp_path, cold=True, MEGATRON_API_TOKEN="hunter2hunter2", code=1)
    summary = json.loads((tmp_path / "ttrace-out" / "summary.json").read_text())
    blame = summary["blame"]
    assert (blame["result"], blame["since"]) == ("proven", "core_v0.19.2")
    assert (blame["hunks"], blame["idle"]) == (4, 1)
    [[hunk]] = [change["hunks"] for change in blame["changes"]]
    assert "".join(hunk["added"]) == FAULT
    assert (hunk["function"], hunk["ran"]) == ("ColumnParallelLinear.forward", "in_culprit")
    assert blame["checks"] == 4
    assert summary["run"]["megatron"]["path"] == str(root / "megatron")
    assert (git(root, "diff"), git(root, "status", "--porcelain")) == before
    files = [
        path
        for path in tmp_path.glob("ttrace-out*/**/*")
        if path.is_file() and path.suffix != ".log"
    ]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    assert "without this hunk it does not" in " ".join(done.stdout.split())
