# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter checks values, not types: a compiler does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DTYPES = 6


@pytest.mark.nightly
def test_for_hopper(tmp_path):
    """Every kernel compiles for every dtype, without a GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.compare.compile_kernels"],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == DTYPES + 1
