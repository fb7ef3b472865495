# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and worse, at moments of a real check: one line, the right exit code, nothing left."""

import sys
import time
from pathlib import Path

import pytest

from megatron_ttrace.jobs.restarts import FIRST
from megatron_ttrace.mcore.sources import megatron_folder
from tests.integration.jobs import SCRIPT, TINY, ttrace
from tests.integration.test_bad_input import refused
from tests.integration.test_checkout import make_checkout, plant
from tests.jobs.commands.commands import Command
from tests.trace.test_owned import state_of

OURS = ("check", "--ttrace-no-wandb", "--nproc-per-node", "2")
RESUME = ("resume", "--nproc-per-node", "2")
LAYOUT = ("--tensor-model-parallel-size", "2")


def start(tmp_path: Path, command: tuple[str, ...] = OURS, *job: object) -> Command:
    """A command for two ranks."""
    words = (sys.executable, "-m", "megatron_ttrace", *command, "--", SCRIPT, *TINY, *LAYOUT)
    return Command(*words, *job, cwd=tmp_path)


def until_there(command: Command, path: Path) -> None:
    """Wait for a file or folder."""
    while not path.exists():
        assert command.process.poll() is None
        time.sleep(0.001)


def interrupted(command: Command) -> None:
    """It ends as it must."""
    command.ctrl_c()
    code, _, errors = command.end()
    assert (code, errors.splitlines()[-1]) == (130, "ttrace: interrupted")
    assert "Traceback" not in errors
    assert command.left() == []


@pytest.mark.parametrize("when", ["logs", pytest.param("reference.log", marks=pytest.mark.nightly)])
def test_ctrl_c(tmp_path: Path, when: str) -> None:
    """While ranks are forked; while the reference runs."""
    command = start(tmp_path)
    until_there(command, tmp_path / "ttrace-out" / when)
    interrupted(command)


@pytest.mark.nightly
@pytest.mark.parametrize("when", [FIRST, "restarted"])
def test_ctrl_c_while_restarting(tmp_path: Path, when: str) -> None:
    """Neither the uninterrupted run nor a restart changes what the job wrote before."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "progress.txt").write_text("mine")
    before = state_of(mine)
    command = start(tmp_path, RESUME, "--save", mine, "--log-progress", "--tensorboard-dir", mine)
    until_there(command, tmp_path / "ttrace-resume" / when / "logs" / "rank-00001.log")
    interrupted(command)
    assert state_of(mine) == before


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "when"),
    [
        (("blame", "--quiet"), "ttrace-out/logs"),
        (("check", "--blame", "--once"), "ttrace-out-blame/search-blame/checks/2/logs"),
    ],
)
def test_ctrl_c_while_blaming(tmp_path: Path, words: tuple[str, ...], when: str) -> None:
    """The check ends, the copy of the tree is removed, and the tree itself is as before."""
    script = make_checkout(tmp_path / "tree")
    plant(tmp_path / "tree")
    before = state_of(tmp_path / "tree")
    words = (sys.executable, "-m", "megatron_ttrace", *words, "--ttrace-no-wandb")
    words += ("--nproc-per-node", "2", "--good", str(Path(megatron_folder()).parent))
    command = Command(*words, "--", script, *TINY, *LAYOUT, cwd=tmp_path)
    until_there(command, tmp_path / when)
    interrupted(command)
    assert state_of(tmp_path / "tree") == before
    assert not list(tmp_path.glob("ttrace-out-blame/**/trees"))


@pytest.mark.nightly
def test_a_stopped_reference(tmp_path: Path) -> None:
    """It is named and ended when its time is up."""
    script = tmp_path / "stops.py"
    script.write_text(
        "import os, signal, sys\n"
        "from megatron_ttrace.jobs import argv\n"
        "if 'reference' in argv.ours(): os.kill(os.getpid(), signal.SIGSTOP)\n"
        # Not runpy: the reference run is of the script that argv names.
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"exec(compile(open({str(SCRIPT)!r}).read(), {str(SCRIPT)!r}, 'exec'))\n"
    )
    done = ttrace(*OURS[:-2], "--timeout", "15", "--", script, *TINY, cwd=tmp_path)
    refused(done, "the reference run (pid", "is stopped", "--timeout")
