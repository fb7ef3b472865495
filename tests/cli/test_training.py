# SPDX-License-Identifier: Apache-2.0
"""The training command that commands are given."""

import argparse
import os
import sys

import pytest

from megatron_ttrace.cli import training
from megatron_ttrace.trace.errors import TTraceError

SCRIPT = "print('a script')\n"
CONSOLE = f"#!{sys.executable}\n{SCRIPT}"


def command_of(words, **options):
    """The command of a command line."""
    return training.command_of(
        argparse.Namespace(command="check", recipe=None, command_words=words, **options)
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A virtual environment, scripts, and a program, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("torchrun", "accelerate"):
        (tmp_path / "bin" / name).write_text(CONSOLE)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "timeout").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    (tmp_path / "train").write_text(CONSOLE)
    shell = '#!/bin/bash\nbin/torchrun --nproc-per-node 2 pretrain_gpt.py "$@"\n'
    (tmp_path / "launch").write_text(shell)
    return tmp_path


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("bin/torchrun --nproc-per-node 2 pretrain_gpt.py", 2),
        ("./bin/python -m torch.distributed.run --nproc-per-node 2 pretrain_gpt.py", 2),
        ("bin/accelerate launch --num_processes 2 pretrain_gpt.py", 2),
        ("bin/timeout 60 torchrun --nproc-per-node 2 pretrain_gpt.py", 2),
        ("bin/python pretrain_gpt.py", None),
        ("./launch", 2),
        ("pretrain_gpt.py", None),
    ],
)
def test_launchers_by_path(place, launcher, ranks):
    """A file is a script only if it does not launch one."""
    command = command_of([*launcher.split(), "--num-layers", "4"])
    assert (command.script, command.ranks) == ("pretrain_gpt.py", ranks)
    assert command.arguments == ("--num-layers", "4")
    assert command_of(["train", "-a"]).script == "train"


@pytest.mark.parametrize(
    "launcher",
    ["torchrun --nproc-per-node gpu", "torchrun --nproc-per-node=auto", "accelerate launch"],
)
def test_ranks_that_are_not_counted(place, launcher):
    """Are asked for, unless they were given."""
    words = [*launcher.split(), "pretrain_gpt.py", "--num-layers", "4"]
    with pytest.raises(TTraceError, match="give the number"):
        command_of(words)
    with pytest.raises(TTraceError, match="give the number"):
        command_of([" ".join(words)], nproc_per_node=None)
    assert command_of(words, nproc_per_node=2).script == "pretrain_gpt.py"


def test_a_text_of_several_lines(place):
    """Nothing of it is lost."""
    text = "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 4\n--pipeline-size 2\n"
    assert command_of([text]).arguments == ("--num-layers", "4", "--pipeline-size", "2")


def test_variables_of_a_command(place, monkeypatch):
    """They decide which Megatron this process imports for all ranks: of a shell script, too."""
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    exports = "export PYTHONPATH=/own:$PYTHONPATH\nunset PYTHONSAFEPATH\n"
    (place / "launch").write_text(f"#!/bin/bash\n{exports}bin/torchrun pretrain_gpt.py $@\n")
    command_of(["bash", "launch", "--num-layers", "4"])
    assert os.environ["PYTHONPATH"] == "/own:/theirs"
    assert "PYTHONSAFEPATH" not in os.environ
    command_of(["PYTHONPATH=/other", "python", "pretrain_gpt.py"])
    assert os.environ["PYTHONPATH"] == "/other"
