# SPDX-License-Identifier: Apache-2.0
"""Megatron's compiled dataset helper without a compiler.

``initialize_megatron`` runs ``make`` inside Megatron's package on rank 0, and exits the process
when that fails, as it does where there is no compiler, no pybind11 or no write permission. A wheel
carries the compiled extension; a checkout does not. Then an installed wheel's extension is used if
it was built from the very same source, and else plain numpy (``cpu/indices.py``).
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron_ttrace.cpu import indices
from megatron_ttrace.cpu.stand_in import replace_everywhere

_NAME = "megatron.core.datasets.helpers_cpp"
_SOURCE = "helpers.cpp"
_COMPILERS = ("c++", "g++", "clang++")


def skip_compilation(*, where_impossible: bool = False) -> bool:
    """Make ``compile_helpers`` do nothing, with a module in place that does what it compiles.

    Args:
        where_impossible: leave it to Megatron where the extension could be compiled.

    Returns:
        Whether compilation is skipped.
    """
    if _NAME not in sys.modules and importlib.util.find_spec(_NAME) is None:
        if where_impossible and can_compile():
            return False
        _put_in_place()
    utils: Any = importlib.import_module("megatron.core.datasets.utils")
    # Megatron-Bridge imports it by name.
    replace_everywhere("compile_helpers", utils.compile_helpers, _compile_nothing)
    return True


def _compile_nothing() -> None:
    """Instead of ``compile_helpers``."""


def can_compile() -> bool:
    """Whether ``make`` would find what it needs."""
    has_compiler = any(shutil.which(name) for name in _COMPILERS)
    return bool(
        has_compiler and shutil.which("make") and importlib.util.find_spec("pybind11") is not None
    )


def compiled_elsewhere(source: Path) -> Path | None:
    """An extension on ``sys.path`` that was compiled from a source like this one."""
    content = source.read_bytes() if source.is_file() else None
    for entry in sys.path:
        folder = Path(entry, "megatron", "core", "datasets")
        source_copy = folder / _SOURCE
        if content is None or not source_copy.is_file() or source_copy.read_bytes() != content:
            continue
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            extension = folder / f"helpers_cpp{suffix}"
            if extension.is_file():
                return extension
    return None


def _put_in_place() -> None:
    package: Any = importlib.import_module("megatron.core.datasets")
    module: Any = indices
    extension = compiled_elsewhere(Path(package.__path__[0], _SOURCE))
    if extension is not None:
        spec = importlib.util.spec_from_file_location(_NAME, extension)
        assert spec is not None
        assert spec.loader is not None
        # ImportError: built for another interpreter or C++ runtime.
        with contextlib.suppress(ImportError):
            compiled = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(compiled)
            module = compiled
    sys.modules[_NAME] = module
    package.helpers_cpp = module
