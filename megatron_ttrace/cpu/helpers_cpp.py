# SPDX-License-Identifier: Apache-2.0
"""Megatron's C++ dataset helpers are used as the wheel ships them.

``initialize_megatron`` runs ``make`` inside the installed package on rank 0, and exits the process
when that fails, as it does where there is no compiler or no write permission. The wheel carries the
compiled extension: when it imports, there is nothing to build.
"""

import importlib
import importlib.util
from typing import Any


def skip_compilation() -> bool:
    """Make ``compile_helpers`` do nothing when the extension imports; say whether it does."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return False
    utils: Any = importlib.import_module("megatron.core.datasets.utils")
    utils.compile_helpers = lambda: None
    return True
