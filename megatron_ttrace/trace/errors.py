# SPDX-License-Identifier: Apache-2.0
"""The one exception that users see, and the exit codes that scripts rely on."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command and of ``--ttrace-exit`` (docs/flags-and-files.md)."""

    EQUIVALENT = 0
    DIVERGED = 1
    COULD_NOT_CHECK = 2


_LONGEST_LINE = 500

DEBUG = "TTRACE_DEBUG"
"""Environment variable: when set, errors are shown with their traceback."""


_SHORTEST_SECRET = 4
_OF_PATH = r"[^\s:;,=()'\"]"
"""A character of a path, in a text."""
_withheld: set[str] = set()


def withhold(values: Iterable[str]) -> None:
    """From now on no error of this process shows these texts (``jobs/commands/disclosure.py``)."""
    for value in values:
        forms = {value, " ".join(value.split()), repr(value)[1:-1], ascii(value)[1:-1]}
        _withheld.update(form for form in forms if len(form) >= _SHORTEST_SECRET)


def without_secrets(text: str) -> str:
    """A text without what was withheld.

    A part of a longer word, or a name in the path of a file that exists, is none of it; a path that
    was withheld is.
    """
    if not any(value in text for value in _withheld):
        return text
    longest_first = sorted(_withheld, key=len, reverse=True)

    def hidden(match: re.Match[str]) -> str:
        start = re.search(rf"{_OF_PATH}*$", text[: match.start()])
        end = re.match(rf"{_OF_PATH}*", text[match.end() :])
        path = "".join(part[0] for part in (start, match, end) if part).rstrip(".")
        is_name = "/" in path and "/" not in match[0]
        return match[0] if is_name and os.path.exists(path) else "***"

    secrets = "|".join(map(re.escape, longest_first))
    return re.sub(rf"(?<!\w)(?:{secrets})(?!\w)", hidden, text)


class TTraceError(Exception):
    """An error that the user can fix: bad input, a wrong environment, a crashed reference.

    The message is one line that says what is wrong and what to do. Commands print it without a
    traceback and exit with :attr:`ExitCode.COULD_NOT_CHECK`.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(arg) if isinstance(arg, str) else arg for arg in args))


@contextlib.contextmanager
def reported(what: str, *kinds: type[Exception], advice: str = "") -> Iterator[None]:
    """Raise a ``TTraceError`` for errors of these kinds: what failed, why, and what to do."""
    try:
        yield
    except kinds as error:
        raise TTraceError(f"{what} ({brief(error)}){advice and f': {advice}'}") from error


def brief(error: BaseException) -> str:
    """Why an error occurred: the first line of its message, or a field that is missing."""
    if isinstance(error, KeyError):
        return f"no field {error.args[0]!r}"
    text = str(getattr(error, "strerror", None) or error)
    return text.strip().partition("\n")[0][:_LONGEST_LINE] or type(error).__name__


def one_line(error: BaseException) -> str:
    """An unexpected error's type and text without line breaks."""
    text = without_secrets(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:_LONGEST_LINE] if text else type(error).__name__
