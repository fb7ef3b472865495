# SPDX-License-Identifier: Apache-2.0
"""The one exception that users see, and the exit codes that scripts rely on."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command and of ``--ttrace-exit`` (docs/flags-and-files.md)."""

    EQUIVALENT = 0
    DIVERGED = 1
    COULD_NOT_CHECK = 2


_LONGEST_LINE = 500

DEBUG = "TTRACE_DEBUG"
"""Environment variable: when set, errors are shown with their traceback."""


class TTraceError(Exception):
    """An error that the user can fix: bad input, a wrong environment, a crashed reference.

    The message is one line that says what is wrong and what to do. Commands print it without a
    traceback and exit with :attr:`ExitCode.COULD_NOT_CHECK`.
    """


def one_line(error: BaseException) -> str:
    """An unexpected error's type and text without line breaks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_LONGEST_LINE] if text else type(error).__name__
