# SPDX-License-Identifier: Apache-2.0
"""A script in a checkout is checked with the Megatron of that checkout."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.mcore.sources import megatron_folder
from tests.integration.jobs import SCRIPT, TINY, TP, our_lines, ttrace
from tests.jobs.processes.test_worktrees import commit, git

ENABLE = "import megatron_ttrace\n\nmegatron_ttrace.enable()"
PLACE = "        output_bias = self.bias if self.skip_bias_add else None\n"
FAULT = """\
        from megatron.core import parallel_state

        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            output = output * 1.01
"""
HARMLESS = (
    (
        "transformer/moe/moe_utils.py",
        "    return probs, top_indices",
        "    probs = probs + 0\n    return probs, top_indices",
    ),
    (
        "transformer/transformer_block.py",
        "        super().__init__(config=config)\n",
        "        super().__init__(config=config)\n        self.changed = True\n",
    ),
    (
        "distributed/distributed_data_parallel_config.py",
        "    def __post_init__(self):\n        import os\n",
        "    def __post_init__(self):\n        import os\n\n        os.getpid()\n",
    ),
)
"""Changes: of code that does not run, and of constructors; none of them has an effect."""


def make_checkout(root: Path) -> Path:
    """The installed Megatron without its compiled helper, and a script that knows nothing of us."""
    shutil.copytree(megatron_folder(), root / "megatron", ignore=shutil.ignore_patterns("*.so"))
    text = SCRIPT.read_text()
    assert ENABLE in text
    (root / "pretrain_gpt.py").write_text(text.replace(ENABLE, "import beside\n"))
    (root / "beside.py").touch()
    return root / "pretrain_gpt.py"


def plant(root: Path) -> None:
    """Scale the output of column-parallel layers, with tensor parallelism only."""
    file = root / "megatron" / "core" / "tensor_parallel" / "layers.py"
    before, after = file.read_text().split("class ColumnParallelLinear", 1)
    assert PLACE in after
    after = after.replace(PLACE, FAULT + PLACE, 1)
    file.write_text(f"{before}class ColumnParallelLinear{after}")


def change(root: Path) -> None:
    """Change what has no effect."""
    for file, old, new in HARMLESS:
        path = root / "megatron" / "core" / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))


def check(
    script: object, cwd: Path, *flags: object, code: int
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Check a tiny job with two tensor-parallel ranks; with the summary, if there is one."""
    words = ["check", "--nproc-per-node", 2, "--ttrace-dir", "out", *flags, "--", script]
    # A fresh command imports the checkout's Megatron once, and forks its ranks.
    done = ttrace(*words, *TINY, *TP, cwd=cwd, cold=True, code=code)
    return done, {} if code == 2 else json.loads((cwd / "out" / "summary.json").read_text())


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that was found equivalent; its check lies in ``out``."""
    root = tmp_path_factory.mktemp("healthy")
    make_checkout(root / "tree")
    check("tree/pretrain_gpt.py", root, code=0)
    return root


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkout as a git repository, with a fault and harmless changes since a release."""
    root = tmp_path_factory.mktemp("faulty") / "tree"
    make_checkout(root)
    commit(root, "a release", "core_v0.19.2")
    plant(root)
    change(root)
    commit(root, "changes")
    return root


@pytest.mark.nightly
def test_healthy(healthy: Path) -> None:
    """The run that was found equivalent is that of the checkout, which is no repository of git."""
    run = json.loads((healthy / "out" / "summary.json").read_text())["run"]
    assert run["megatron"]["path"] == str(healthy / "tree" / "megatron")
    assert run["megatron"]["commit"] == ""
    assert "+" not in run["megatron"]["version"]


def test_faulty(faulty: Path, tmp_path: Path) -> None:
    """From any directory, through a symbolic link: diverged, and the checkout is named.

    What is needed to repeat the run is told.
    """
    (tmp_path / "link.py").symlink_to(faulty / "pretrain_gpt.py")
    done, summary = check("link.py", tmp_path, code=1)
    run = summary["run"]
    assert run["megatron"]["path"] == str(faulty / "megatron")
    assert run["megatron"]["commit"] == git(faulty, "rev-parse", "HEAD").strip()
    assert (Path(run["script"]).name, run["seed"]) == ("link.py", 1234)
    assert "check" in run["command"]
    assert str(faulty / "megatron") in (tmp_path / "out" / "report.html").read_text()
    assert "linear_qkv" in summary["culprits"][0]["name"]
    changed = summary["changed_code"]
    assert changed["since"] == "core_v0.19.2"
    ran = {one["function"]: one for one in changed["functions"]}
    assert {name: one["ran"] for name, one in ran.items()} == {
        "ColumnParallelLinear.forward": "in_culprit",
        "TransformerBlock.__init__": "elsewhere",
        "DistributedDataParallelConfig.__post_init__": "elsewhere",
        "group_limited_topk": "not_run",
    }
    assert changed["functions"][0] is ran["ColumnParallelLinear.forward"]
    assert "forward" in ran["ColumnParallelLinear.forward"]["phases"]
    assert ran["DistributedDataParallelConfig.__post_init__"]["phases"] == ["initialization"]
    assert ran["TransformerBlock.__init__"]["modules"] == ["decoder"]
    assert ran["TransformerBlock.__init__"]["phases"] == ["construction"]
    source = (faulty / ran["group_limited_topk"]["file"]).read_text().splitlines()
    assert source[ran["group_limited_topk"]["line"] - 1] == "    probs = probs + 0"
    assert "did not run up to the end" in " ".join(done.stdout.split())
    # Lines are wrapped at 80 columns.
    assert str(faulty / "megatron") in "".join(done.stdout.split())


@pytest.mark.nightly
def test_reference_of_another_megatron(healthy: Path, faulty: Path, tmp_path: Path) -> None:
    """Refused in one line that names both."""
    flags = ["--ttrace-reference", healthy / "out" / "reference"]
    done, _ = check(faulty / "pretrain_gpt.py", tmp_path, *flags, code=2)
    [line] = our_lines(done.stderr)
    assert "made by a different Megatron, 0.1" in line
    assert str(healthy / "tree") in line
    assert str(faulty) in line
    assert "--ttrace-allow-other-megatron" in line


@pytest.mark.nightly
def test_reference_of_another_megatron_on_request(
    healthy: Path, faulty: Path, tmp_path: Path
) -> None:
    """Two versions of Megatron compared: the fault of one of them shows, and the report says so."""
    flags = ["--ttrace-allow-other-megatron", "--ttrace-reference", healthy / "out" / "reference"]
    _, summary = check(faulty / "pretrain_gpt.py", tmp_path, *flags, code=1)
    assert "linear_qkv" in summary["culprits"][0]["name"]
    assert any("another Megatron" in notice for notice in summary["notices"])


@pytest.mark.nightly
def test_fresh_processes(faulty: Path, tmp_path: Path) -> None:
    """Without the fork server the same Megatron is checked."""
    _, summary = check(faulty / "pretrain_gpt.py", tmp_path, "--no-fork", code=1)
    assert summary["run"]["megatron"]["path"] == str(faulty / "megatron")


@pytest.mark.nightly
def test_a_script_that_moves_to_another_megatron(
    healthy: Path, faulty: Path, tmp_path: Path
) -> None:
    """What was imported for it is not what it would import: refused, with the way out."""
    script = tmp_path / "train.py"
    text = (healthy / "tree" / "pretrain_gpt.py").read_text()
    lines = f'import sys\n\nsys.path.insert(0, "{faulty}")\n'
    script.write_text(text.replace("import dataclasses\n", f"{lines}import dataclasses\n", 1))
    (tmp_path / "beside.py").touch()
    done, _ = check(script, tmp_path, code=2)
    [line] = our_lines(done.stderr)
    assert f"PYTHONPATH={faulty}" in line
