# SPDX-License-Identifier: Apache-2.0
"""check.slurm starts one torchrun per node and ends with the check's own exit code."""

import os
from pathlib import Path

import pytest

from tests import programs

SCRIPT = Path(__file__).parents[2] / "launch" / "check.slurm"


@pytest.mark.parametrize("answer", [0, 1, 2])
def test_check(tmp_path: Path, answer: int) -> None:
    """With stand-ins for Slurm's commands: what is started, on which node it meets, what is told.

    A run that diverged ends torchrun with 1, like one that crashed; the report knows which.
    """
    stands = {
        "scontrol": "printf 'node-7\\nnode-8\\n'",
        "srun": f'echo "$*" >{tmp_path}/started; exit 1',
        "ttrace": f'echo "$*" >{tmp_path}/reported; exit {answer}',
    }
    for name, text in stands.items():
        programs.executable(tmp_path / name, f"#!/bin/bash\n{text}\n")
    words = ("bash", SCRIPT, "--num-layers", "2", "--data-path", "a b")
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    programs.run(*words, cwd=tmp_path, timeout=600, **variables, code=answer)
    started = (tmp_path / "started").read_text()
    for part in (
        "torchrun --nnodes 2 --nproc-per-node 4",
        "--rdzv-endpoint node-7:29500",
        "launch/pretrain_gpt.py --num-layers 2 --data-path a b --ttrace --ttrace-exit",
        f"--ttrace-dir {tmp_path}/ttrace-out/42",
    ):
        assert part in started
    assert f"--junit {tmp_path}/ttrace-out/42/junit.xml" in (tmp_path / "reported").read_text()
