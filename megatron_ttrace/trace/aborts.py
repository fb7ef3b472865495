# SPDX-License-Identifier: Apache-2.0
"""A last word of a process that is aborted by code that is not Python's."""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable

from megatron_ttrace.trace import compiled


@functools.cache
def _library() -> ctypes.CDLL | None:
    return compiled.load("trace.aborts")


def is_compiled() -> bool:
    """Whether :func:`before` can do something."""
    return _library() is not None


def before(say: Callable[[], None], seconds: float) -> Callable[[], None]:
    """Call ``say`` on a thread when SIGABRT is about to end this process.

    Not if there is another handler, or if the aborted thread has Python's lock.

    Args:
        say: may take ``seconds``.
        seconds: after which the process ends anyway.

    Returns:
        What stops that.
    """
    library = _library()
    if library is None:
        return lambda: None
    asked, ask = os.pipe()
    answered, answer = os.pipe()

    def wait() -> None:
        os.read(asked, 1)
        os.write(answer, b".")
        with contextlib.suppress(Exception):
            say()
        os.write(answer, b".")

    if library.ttrace_guard(ask, answered, int(1000 * seconds)):
        threading.Thread(target=wait, daemon=True).start()
    return library.ttrace_unguard
