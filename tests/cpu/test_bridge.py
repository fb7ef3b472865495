# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge on a CPU. What runs it is skipped where it is absent: `make bridge` runs it."""

import math
import re
from pathlib import Path

import pytest

from tests.bridge import data
from tests.integration.jobs import ROOT, torchrun

SCRIPTS = ROOT / "tests" / "bridge"


@pytest.mark.bridge
@pytest.mark.parametrize(
    "words",
    [
        "llama.py",
        "job.py experts model.expert_model_parallel_size=2",
        "job.py llama32_1b_pretrain_config",
        "job.py llama sft",
    ],
)
def test_an_unmodified_script_trains(words: str, tmp_path: Path) -> None:
    """Two iterations over gloo, in forks of one process."""
    data.write(tmp_path / "data")
    script, *others = words.split()
    done = torchrun(2, SCRIPTS / "train.py", SCRIPTS / script, *others, cwd=tmp_path, code=0)
    assert "on the CPU over gloo" in done.stdout
    assert "Traceback" not in done.stdout
    # The last rank prints them.
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 2
    assert all(0 < loss < math.log(128) + 1 for loss in losses)


@pytest.mark.bridge
def test_torchrun(tmp_path: Path) -> None:
    """In fresh interpreters."""
    words = (SCRIPTS / "train.py", SCRIPTS / "llama.py")
    done = torchrun(2, *words, cwd=tmp_path, cold=True, code=0)
    assert len(re.findall("lm loss", done.stdout)) == 2
