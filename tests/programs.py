# SPDX-License-Identifier: Apache-2.0
"""Run programs as a shell would, in processes of their own, and keep what they print."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(**variables: str) -> dict[str, str]:
    """This process' environment, with the checkout first on the path, and one thread."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}


def ended(done: subprocess.CompletedProcess[str], code: int | None) -> None:
    """Require this exit code, if there is one, of a program that ended."""
    assert code in (None, done.returncode), done.stdout[-3000:] + done.stderr[-3000:]


def run(
    *words: object,
    cwd: Path = ROOT,
    timeout: float = 600,
    code: int | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program that can import the checkout, and must end with ``code``."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    ended(done, code)
    return done


def executable(path: Path, text: str) -> Path:
    """A program in a file that can be started; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def python(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """The same with ``python WORDS``."""
    return run(sys.executable, *words, **more)
