# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for each other: the collectives are named, and a check ends."""

from pathlib import Path

import pytest

from tests.integration.jobs import TINY, ttrace

SCRIPT = Path(__file__).with_name("stalled.py")


def check(folder: Path, where: str, *more: str):
    """Check a job of two ranks that meet in a collective."""
    return ttrace(
        *("check", "--ttrace-no-wandb", "--nproc-per-node", 2, *more, "--", SCRIPT, *TINY),
        *("--tensor-model-parallel-size", 2),
        cwd=folder,
        STALL=where,
    )


@pytest.mark.parametrize(
    ("where", "module"),
    [("forward", ", module decoder.layers.0.mlp, at megatron/core/"), ("building", "")],
)
def test_a_rank_that_does_not_come(tmp_path: Path, where: str, module: str) -> None:
    """One line with the collective of each rank, exit code 2; no time-out is needed."""
    done = check(tmp_path, where)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("ttrace: the ranks wait for each other forever, not all ranks of the ")
    assert f"rank 0 waits in all_reduce of 4 float32 elements (ranks 0, 1){module}" in line
    assert "; rank 1 waits in " in line


def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    """A line, and the check goes on."""
    done = check(tmp_path, "slow")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "no progress for 3 s: rank 0 waits in all_reduce of 4 float32 elements" in done.stderr
