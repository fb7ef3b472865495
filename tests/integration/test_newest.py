# SPDX-License-Identifier: Apache-2.0
"""Patch releases of megatron-core that are newer than those that are tested."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ttrace.cli import doctor
from megatron_ttrace.mcore.versions import SUPPORTED
from megatron_ttrace.trace.errors import TTraceError
from tests import programs


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_newer_patch_releases(tmp_path: Path) -> None:
    """The release tests pass with each of them, and then fail until it is the tested one."""
    try:
        newer = doctor.newer_releases()
    except TTraceError as error:
        pytest.skip(f"no package index: {error}")
    for version in newer.values():
        folder = tmp_path / version
        install = ["-m", "pip", "install", "-q", "--no-deps", "--target", folder]
        subprocess.run([sys.executable, *install, f"megatron-core=={version}"], check=True)
        words = ("-m", "pytest", "-q", "tests/integration/test_releases.py")
        variables = {"PYTHONPATH": str(folder), "TTRACE_TEST_RELEASE": version}
        done = programs.python(*words, timeout=3600, **variables)
        assert done.returncode == 0, f"megatron-core {version}:\n{done.stdout[-5000:]}"
    assert not newer, f"works, and is to replace what is tested ({SUPPORTED}): {newer}"
