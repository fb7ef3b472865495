# SPDX-License-Identifier: Apache-2.0
"""Which environment a command runs in, and what is heard of it."""

import importlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_ttrace.jobs.commands import command_line
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.trace.errors import TTraceError

JOB = ["pretrain_gpt.py", "--num-layers", "2"]


def test_the_interpreter_of_a_command(tmp_path):
    """The one that it names, or the one beside its torchrun, also in quotes; else this one."""
    tmp_path = tmp_path / "my environment"
    tmp_path.mkdir()
    for name in ("python", "python3.12", "torchrun"):
        (tmp_path / name).touch()
    torchrun = [f"{tmp_path}/torchrun", "--nproc-per-node", "2", *JOB]
    for words, name in (
        (torchrun, "python"),
        (["A=b", f"{tmp_path}/python3.12", *JOB], "python3.12"),
        ([shlex.join(torchrun)], "python"),
        ([f'"$HERE/python3.12" {" ".join(JOB)}'], "python3.12"),
        (["bash", "-c", shlex.join(torchrun)], "python"),
    ):
        command = command_line.parse(words, {"HERE": str(tmp_path)})
        assert apart.interpreter_of(command) == f"{tmp_path}/{name}"
    for words in (
        ["torchrun", *JOB],
        ["torchrun", *JOB, "--data-path", "a/python"],
        ["PYTHON=/a/python", "torchrun", *JOB],
    ):
        assert apart.interpreter_of(command_line.parse(words)) == sys.executable
    with pytest.raises(TTraceError, match="absent/python: no such interpreter"):
        apart.interpreter_of(command_line.parse(["absent/python", *JOB]))


@pytest.fixture
def warm(monkeypatch):
    """A process that can be forked: it has torch, and no Megatron."""
    importlib.import_module("torch")
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("has_megatron", [False, True])
def test_its_error(tmp_path, monkeypatch, has_megatron):
    """Its exit code and its own words; a fork leaves temporary directories of this one alone.

    A process that has imported Megatron is not forked.
    """
    if has_megatron:
        monkeypatch.setitem(sys.modules, "megatron.core", sys)
        monkeypatch.setattr(os, "fork", None)
    else:
        monkeypatch.setattr(subprocess.Popen, "__init__", None)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ours = tempfile.TemporaryDirectory(dir=tmp_path)
    words = ["compare", str(tmp_path / "absent"), "b"]
    code, reason = apart.ttrace(sys.executable, words, environment, quiet=True, warm=True)
    assert code == 2
    assert "absent" in reason
    assert not reason.startswith("ttrace:")
    assert Path(ours.name).is_dir()
    ours.cleanup()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("variable", ["PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"])
def test_where_a_fork_compiles(tmp_path, monkeypatch, variable):
    """As its environment asks, and as a new process does."""
    (tmp_path / "probe.py").write_text(
        "import sys\nprint(sys.dont_write_bytecode, sys.pycache_prefix, file=sys.stderr)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    environment = {"PYTHONPATH": str(tmp_path), variable: "x"}
    lines = {
        apart.ttrace(sys.executable, [], environment, quiet=True, module="probe", warm=is_warm)[1]
        for is_warm in (True, False)
    }
    assert len(lines) == 1, lines
