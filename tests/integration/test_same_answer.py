# SPDX-License-Identifier: Apache-2.0
"""An answer does not depend on how busy the machine is."""

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.trace.files import load_report
from tests.integration.jobs import SCRIPT, TINY, ttrace

JOB = (
    *TINY,
    *"--tensor-model-parallel-size 2 --sequence-parallel --normalization RMSNorm".split(),
    *"--transformer-impl transformer_engine --disable-bias-linear --ttrace-bug 11".split(),
)
"""The gradients of norms are not summed over tensor-parallel ranks."""


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Within this context so many processes compute all the time."""
    running = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def answer(directory: Path) -> tuple[Any, ...]:
    """All that a check found out and says: its summary without times, and its verdicts."""
    directory.mkdir()
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", 2, "--", SCRIPT, *JOB),
        cwd=directory,
    )
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    summary, verdicts = load_report(directory / "ttrace-out")
    (culprit, *_) = summary.culprits
    assert culprit.cause is not None
    return dataclasses.replace(summary, run=None, timings={}), verdicts


def answers(directory: Path, loads: list[int]) -> list[tuple[Any, ...]]:
    """One check for each number of busy processes, with a reference of its own."""
    found = []
    for number, load in enumerate(loads):
        with busy(load):
            found.append(answer(directory / str(number)))
    return found


def test_twice(tmp_path):
    """Alone, and beside two busy processes."""
    alone, beside = answers(tmp_path, [0, 2])
    assert alone == beside


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ten_times(tmp_path):
    """Five times alone, five times beside eight busy processes."""
    first, *others = answers(tmp_path, [0] * 5 + [8] * 5)
    assert others == [first] * 9
