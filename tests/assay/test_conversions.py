# SPDX-License-Identifier: Apache-2.0
"""The campaign of conversions: a small sample of it."""

from pathlib import Path

from tests.integration import jobs


def test_a_sample(tmp_path: Path) -> None:
    """No false alarm, and every error is named."""
    words = ("-m", "tests.assay", "conversions", "--count", 8, "--seed", 20)
    done = jobs.python(*words, cwd=tmp_path, code=0)
    assert "same: 100.0%" in done.stdout
