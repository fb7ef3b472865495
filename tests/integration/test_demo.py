# SPDX-License-Identifier: Apache-2.0
"""``ttrace demo``: the healthy run passes, the bug is found, within the promised time."""

import json
import resource
from pathlib import Path

import pytest

from tests import programs
from tests.integration.jobs import ttrace

NEXT = "As it stands, this runs:\n"


def cpu_seconds() -> float:
    """What finished children have used, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_demo(tmp_path: Path, cold: bool) -> None:
    """Both outcomes stand in the files, and the report names the embedding.

    From a cold start, within the promised time; the command that it ends with works as well.
    """
    spent = cpu_seconds()
    mode = "offline" if cold else "disabled"
    done = ttrace("demo", "--directory", "demo", cwd=tmp_path, cold=cold, WANDB_MODE=mode, code=0)
    # Not by the clock, which on a machine that does other things says nothing of the demo.
    assert not cold or cpu_seconds() - spent < 120
    healthy, faulty = (
        json.loads((tmp_path / "demo" / name / "summary.json").read_text())
        for name in ("healthy", "faulty")
    )
    assert healthy["verdict"] == "equivalent"
    assert faulty["verdict"] == "diverged"
    first = faulty["culprits"][0]
    found = (first["name"], first["kind"], first["direction"])
    assert found == ("embedding.word_embeddings", "output", "forward")
    # Only a path, which is not divided, may be longer.
    assert not [line for line in done.stdout.splitlines() if len(line) > 80 and "/" not in line]
    command = done.stdout.partition(NEXT)[2]
    assert " check --shrink -- torchrun " in command
    if cold:
        again = programs.run("bash", "-c", command, cwd=tmp_path, WANDB_MODE=mode, code=0)
        assert again.stdout.startswith("ttrace  equivalent")
