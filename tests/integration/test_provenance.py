# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself is true, and gives no secret away."""

import json
import sys
from pathlib import Path

import pytest

from megatron_ttrace.jobs import provenance
from megatron_ttrace.jobs.commands import disclosure
from tests.jobs.processes.test_worktrees import commit, git


def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commit and whether it is dirty; an untracked file inside it has neither."""
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 300.0)
    tracked, other = tmp_path / "a" / "one.py", tmp_path / "a" / "two.py"
    tracked.parent.mkdir()
    tracked.touch()
    assert provenance.commit_of(tracked) == ("", False)
    commit(tmp_path, "one")
    other.touch()
    head = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.commit_of(tracked) == (head, False)
    assert provenance.commit_of(other) == ("", False)
    tracked.write_text("changed")
    assert provenance.commit_of(tracked) == (head, True)


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent or hanging, git fails no run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit_of(Path(__file__)) == ("", False)
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 0.2)
    assert provenance.commit_of(Path(__file__)) == ("", False)


def test_no_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the environment nor of the command line."""
    variables = {
        "NVTE_FUSED_ATTN": "0",
        "TORCH_HUB_TOKEN": "hidden",
        "TTRACE_API_KEY": "hidden",
        "WANDB_API_KEY": "hidden",
        "TTRACE_CACHE": "/c",
    }
    chosen = provenance._chosen(variables, provenance._NAMES, provenance._PREFIXES)
    assert disclosure.environment(chosen) == {
        "NVTE_FUSED_ATTN": "0",
        "TORCH_HUB_TOKEN": "***",
        "TTRACE_API_KEY": "***",
        "TTRACE_CACHE": "/c",
    }
    words = ["--hf-token", "hidden", "--wandb-api-key=hidden", "--tokenizer-type", "x"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", *words])
    assert json.loads(provenance.command_line()) == [
        *("python", "train.py", "--hf-token", "***", "--wandb-api-key=***"),
        *("--tokenizer-type", "x"),
    ]
