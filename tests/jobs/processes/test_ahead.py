# SPDX-License-Identifier: Apache-2.0
"""Torch's libraries are loaded by a thread that has ended before anything is forked."""

import subprocess
import sys

import pytest

_PROGRAM = """
import sys, threading
from pathlib import Path
from megatron_ttrace.jobs.processes import ahead

if not {installed}:
    ahead._LIBRARIES = [("other.so", 2)]
ahead.load_torch()
assert threading.active_count() == 1
assert "torch" not in sys.modules
is_loaded = "libtorch_python.so" in Path("/proc/self/maps").read_text()
import torch
print(is_loaded, float(torch.ones(2).sum()))
"""


@pytest.mark.parametrize("installed", [True, False])
def test_libraries_are_loaded_before_torch_is_imported(installed: bool) -> None:
    """Where they have other names, torch finds them by itself."""
    command = [sys.executable, "-c", _PROGRAM.format(installed=installed)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [str(installed), "2.0"]
