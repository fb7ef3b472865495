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

from tests.integration.jobs import TP, check

JOB = (
    *TP,
    *"--sequence-parallel --normalization RMSNorm --transformer-impl transformer_engine".split(),
    *"--disable-bias-linear --ttrace-bug 11".split(),
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
        for process in running:
            process.kill()
            process.wait()


def answer(directory: Path, load: int) -> tuple[Any, ...]:
    """All that a check found out and says: its summary without times, and its verdicts."""
    directory.mkdir()
    with busy(load):
        checked = check(directory, *JOB, code=1, TTRACE_CACHE="")
    (culprit, *_) = checked.summary.culprits
    assert culprit.cause is not None
    return dataclasses.replace(checked.summary, run=None, timings={}), checked.verdicts


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ten_times(tmp_path):
    """Five times alone, five times beside eight busy processes, with a reference of its own."""
    loads = enumerate([0] * 5 + [8] * 5)
    first, *others = (answer(tmp_path / str(number), load) for number, load in loads)
    assert others == [first] * 9
