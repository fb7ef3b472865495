# SPDX-License-Identifier: Apache-2.0
"""Run programs as a shell would, in processes of their own, and keep what they print."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(
    *words: object, cwd: Path = ROOT, timeout: float = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that can import the checkout; ``variables`` are added to the environment."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def python(
    *words: object, cwd: Path = ROOT, timeout: float = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The same with ``python WORDS``."""
    return run(sys.executable, *words, cwd=cwd, timeout=timeout, **variables)
