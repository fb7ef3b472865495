# SPDX-License-Identifier: Apache-2.0
"""Load torch's shared libraries while this process imports Python modules.

That is a quarter of ``import torch``, and needs no lock of Python's: addresses are relocated.
"""

import contextlib
import ctypes
import importlib
import importlib.machinery
import os
import threading
from pathlib import Path

_LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_GLOBAL | os.RTLD_NOW),
    ("libtorch_python.so", os.RTLD_NOW),
)
"""In the order and with the flags of torch/__init__.py."""
_COMPILED = ("array", "cmath", "contextvars", "decimal", "mmap", "pickle", "queue", "uuid")
"""Imported before: the dynamic loader has one lock, so modules in C would wait for torch."""
_IN_PYTHON_ALONE = "sympy"
"""Torch imports it, too."""


def load_torch() -> None:
    """Load torch's libraries in a thread, which ends before this returns.

    What goes wrong is not reported: ``import torch`` will.
    """
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    for name in _COMPILED:
        importlib.import_module(name)
    folder = Path(spec.origin).with_name("lib")
    # ``ctypes.CDLL(path)`` would hold Python's lock.
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p

    def run() -> None:
        for name, flags in _LIBRARIES:
            load(os.fsencode(folder / name), flags)

    thread = threading.Thread(target=run, daemon=True)
    with contextlib.suppress(RuntimeError):  # a limit leaves no room for it
        thread.start()
        with contextlib.suppress(ImportError):
            importlib.import_module(_IN_PYTHON_ALONE)
        thread.join()
