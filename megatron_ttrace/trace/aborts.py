# SPDX-License-Identifier: Apache-2.0
"""Report the state of a process that code other than Python's aborts, before it ends."""

import contextlib
import os
import threading
from collections.abc import Callable

from megatron_ttrace.trace import compiled


def before(report: Callable[[], None], seconds: float) -> Callable[[], None]:
    """Call ``report`` on a thread when SIGABRT is about to end this process.

    Not if there is another handler, or if the aborted thread has Python's lock. The process ends
    after ``seconds`` at the latest. Returns a function that undoes this.
    """
    library = compiled.load("trace.aborts")
    if library is None:
        return lambda: None
    asked, ask = os.pipe()
    answered, answer = os.pipe()

    def wait() -> None:
        os.read(asked, 1)
        os.write(answer, b".")
        with contextlib.suppress(Exception):
            report()
        os.write(answer, b".")

    if library.ttrace_guard(ask, answered, int(1000 * seconds)):
        threading.Thread(target=wait, daemon=True).start()
    return library.ttrace_unguard
