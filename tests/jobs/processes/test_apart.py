# SPDX-License-Identifier: Apache-2.0
"""Which environment a command runs in, and what is heard of it."""

import os
import sys
from pathlib import Path

from megatron_ttrace.jobs.processes import apart

JOB = ["pretrain_gpt.py", "--num-layers", "2"]


def test_the_interpreter_of_a_command(tmp_path):
    """The one that it names, or the one beside its torchrun; else this one."""
    for name in ("python", "python3.12", "torchrun"):
        (tmp_path / name).touch()
    torchrun = [f"{tmp_path}/torchrun", "--nproc-per-node", "2", *JOB]
    assert apart.interpreter_of(torchrun) == f"{tmp_path}/python"
    assert apart.interpreter_of(["A=b", f"{tmp_path}/python3.12", *JOB]) == f"{tmp_path}/python3.12"
    assert apart.interpreter_of(["torchrun", *JOB]) == sys.executable


def test_its_error(tmp_path):
    """Its exit code, and its own words."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = ["compare", str(tmp_path / "absent"), "b"]
    code, said = apart.ttrace(sys.executable, words, environment, quiet=True)
    assert code == 2
    assert "absent" in said
    assert not said.startswith("ttrace:")
