# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for each other: the collectives are named, and a check ends."""

from pathlib import Path

import pytest

from megatron_ttrace.trace import compiled
from tests.integration.jobs import TP, check


@pytest.mark.parametrize(
    ("mistake", "module"),
    [
        ("stalled_forward", ", module decoder.layers.0.mlp, at megatron/core/"),
        pytest.param("stalled_building", "", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_does_not_come(tmp_path: Path, mistake: str, module: str) -> None:
    """One line with the collective of each rank, exit code 2; no time-out is needed."""
    checked = check(tmp_path, *TP, code=2, mistake=mistake)
    line = checked.done.stderr.splitlines()[-1]
    assert line.startswith("ttrace: the ranks wait for each other forever, not all ranks of the ")
    assert f"rank 0 waits in all_reduce of 4 float32 elements (ranks 0, 1){module}" in line
    assert "; rank 1 waits in " in line


@pytest.mark.skipif(compiled.load("trace.aborts") is None, reason="not compiled")
def test_collectives_of_different_sizes(tmp_path: Path) -> None:
    """gloo aborts a rank; each rank's collective is named first."""
    checked = check(tmp_path, *TP, code=2, mistake="mismatched_forward")
    line = checked.done.stderr.splitlines()[-1]
    assert "was aborted in a collective, their sizes differ: rank 0 waits in " in line
    assert "rank 0 waits in all_reduce of 4 float32 elements (world group, ranks 0, 1), " in line
    assert "; rank 1 waits in all_reduce of 8 float32 elements (world group, ranks 0, 1), " in line


@pytest.mark.nightly
def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    """A line, and the check goes on."""
    log = check(tmp_path, *TP, mistake="slow_forward").out / "logs" / "rank-00000.log"
    assert (
        "no progress for 3 s: rank 0 waits in all_reduce of 4 float32 elements" in log.read_text()
    )
