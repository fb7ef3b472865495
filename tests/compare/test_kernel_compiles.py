# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter checks values, not types: a compiler does."""

import pytest

from tests import programs

DTYPES = 6


@pytest.mark.nightly
def test_for_hopper(tmp_path):
    """Every kernel compiles for every dtype, without a GPU."""
    variables = {"TRITON_CACHE_DIR": str(tmp_path)}
    done = programs.python("-m", "tests.compare.compile_kernels", timeout=3600, **variables, code=0)
    assert len(done.stdout.splitlines()) == DTYPES + 1
