# SPDX-License-Identifier: Apache-2.0
"""The C files of this package, which setup.py compiles where there is a C compiler."""

import ctypes
import importlib.util
import zlib
from pathlib import Path

NAMES = ("compare.sums", "trace.mapped", "trace.aborts")


def load(name: str) -> ctypes.CDLL | None:
    """The compiled file of ``name``, for instance ``compare.sums``.

    ``None`` if there is none, or one of another source or for another processor.
    """
    room, _, stem = name.rpartition(".")
    spec = importlib.util.find_spec(f"megatron_ttrace.{room}._{stem}")
    if spec is None or spec.origin is None:
        return None
    try:
        loaded = ctypes.CDLL(spec.origin)
        of = ctypes.c_uint32.in_dll(loaded, "ttrace_source").value
    except (OSError, ValueError):
        return None
    source = Path(__file__).parents[1] / room / f"{stem}.c"  # in a checkout
    return loaded if not source.is_file() or zlib.crc32(source.read_bytes()) == of else None
