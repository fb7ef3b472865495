# SPDX-License-Identifier: Apache-2.0
"""``torchrun tests/bridge/train.py SCRIPT ARGS``: an unmodified script on a CPU, unchecked."""

import runpy
import sys
from pathlib import Path

import megatron_ttrace
from tests.warm import save_without_manager

megatron_ttrace.enable()
save_without_manager()
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
