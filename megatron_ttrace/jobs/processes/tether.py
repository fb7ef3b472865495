# SPDX-License-Identifier: Apache-2.0
"""Start a program that the kernel kills when the process that started it dies, however it dies.

Run as a script, between ``fork`` and the program: ``python -I -S tether.py PARENT PROGRAM ARGS``.
Doing this in ``preexec_fn`` would run Python in the fork of a process with threads.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies.

    Ranks whose parent was killed would wait for each other for hours. The request is tied to the
    *thread* of the parent that forked, and does not cover a parent that is dead already.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def tethered(command: Sequence[str]) -> list[str]:
    """``command`` with this script before it, for a child of the calling process."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def _main() -> None:
    die_with(int(sys.argv[1]))
    # The parent may have blocked signals; the mask would outlast ``exec``.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # This interpreter ignores SIGPIPE, and that would outlast it too.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    program = sys.argv[2:]
    try:
        os.execvp(program[0], program)  # noqa: S606
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")


if __name__ == "__main__":
    _main()
