# SPDX-License-Identifier: Apache-2.0
"""Ranks of several nodes must see the same --ttrace-dir."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.integration import shared
from megatron_ttrace.reference.launch import free_port
from tests.integration.jobs import SCRIPT, TINY, environment


def test_one_directory(tmp_path: Path) -> None:
    """What one rank marks another one finds."""
    shared.require(tmp_path / "out", shared.prepare(tmp_path / "out"))


@pytest.mark.parametrize("there", [None, "another run"])
def test_another_nodes_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str | None
) -> None:
    """No mark, or one of another run: one line that says what to choose."""
    monkeypatch.setattr(shared, "_PAUSE", 0.0)
    mark = shared.prepare(tmp_path)
    (tmp_path / shared.MARK).unlink()
    if there is not None:
        (tmp_path / shared.MARK).write_text(there)
    with pytest.raises(TTraceError, match="that all nodes share") as caught:
        shared.require(tmp_path, mark)
    assert "\n" not in str(caught.value)


def test_a_late_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that shows up after a moment is enough."""
    mark = shared.prepare(tmp_path)
    (tmp_path / shared.MARK).unlink()
    monkeypatch.setattr(shared.time, "sleep", lambda _: (tmp_path / shared.MARK).write_text(mark))
    shared.require(tmp_path, mark)


def test_not_writable(tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "out").write_text("")
    with pytest.raises(TTraceError, match="not writable"):
        shared.prepare(tmp_path / "out")


def agents(folder: Path, directory: str) -> list[tuple[int, str]]:
    """Exit codes and output of two torchrun agents, each with a rank and a folder of its own."""
    port = free_port()
    started = []
    for node in range(2):
        home = folder / f"node{node}"
        home.mkdir()
        started.append(
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                    *("--node-rank", str(node), "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
                    *("--rdzv-endpoint", f"127.0.0.1:{port}", SCRIPT, *TINY),
                    *("--tensor-model-parallel-size", "2", "--ttrace", "--ttrace-exit"),
                    *("--ttrace-no-wandb", "--ttrace-dir", directory),
                ],
                cwd=home,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=280)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.mark.nightly
def test_two_nodes(tmp_path: Path) -> None:
    """Two agents, as on two nodes: one shared directory is all they need in common."""
    for code, text in agents(tmp_path, str(tmp_path / "out")):
        assert code == 0, text[-3000:]
    assert '"verdict": "equivalent"' in (tmp_path / "out" / "summary.json").read_text()


@pytest.mark.nightly
def test_two_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    """A directory of each node's own is told in one line."""
    found = agents(tmp_path, "out")
    assert all(code != 0 for code, _ in found)
    assert any("choose a directory that all nodes share" in text for _, text in found)
