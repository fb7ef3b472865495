# SPDX-License-Identifier: Apache-2.0
"""``ttrace demo``: the healthy run passes, the bug is found, within the promised time."""

import json
import resource
from pathlib import Path

import pytest

from tests import programs
from tests.integration.jobs import environment, ttrace

NEXT = "As it stands, this runs:\n"


def cpu_seconds() -> float:
    """What finished children have used, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_demo(tmp_path: Path) -> None:
    """Both outcomes stand in the files, and the report names the embedding."""
    spent = cpu_seconds()
    done = ttrace("demo", "--directory", "demo", cwd=tmp_path, cold=True, WANDB_MODE="offline")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # Not by the clock, which on a machine that does other things says nothing of the demo.
    assert cpu_seconds() - spent < 120
    healthy, faulty = (
        json.loads((tmp_path / "demo" / name / "summary.json").read_text())
        for name in ("healthy", "faulty")
    )
    assert healthy["verdict"] == "equivalent"
    assert faulty["verdict"] == "diverged"
    first = faulty["culprits"][0]
    assert (first["name"], first["kind"], first["direction"]) == (
        "embedding.word_embeddings",
        "output",
        "forward",
    )
    # Only a path, which is not divided, may be longer.
    assert not [line for line in done.stdout.splitlines() if len(line) > 80 and "/" not in line]
    assert " check --shrink -- torchrun " in done.stdout.partition(NEXT)[2]


@pytest.mark.nightly
def test_what_it_says_to_do_next(tmp_path: Path) -> None:
    """It works in the same shell."""
    done = ttrace("demo", "--directory", "demo", cwd=tmp_path, WANDB_MODE="offline")
    command = done.stdout.partition(NEXT)[2]
    variables = environment(WANDB_MODE="offline")
    again = programs.run("bash", "-c", command, cwd=tmp_path, timeout=840, **variables)
    assert again.returncode == 0, command + again.stderr[-3000:]
    assert again.stdout.startswith("ttrace  equivalent")
