# SPDX-License-Identifier: Apache-2.0
"""An optimizer that steps copies in the host's memory: what it steps, and how that is restored."""

from pathlib import Path

from tests.integration import jobs


def test_steps_and_restores(tmp_path: Path) -> None:
    """In a process of its own, which replaces what needs a GPU."""
    words = "-m", "tests.mcore.offloaded"
    jobs.python(*words, cwd=tmp_path, code=0)
