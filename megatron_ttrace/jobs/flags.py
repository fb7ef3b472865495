# SPDX-License-Identifier: Apache-2.0
"""The parser of our command lines, and the values that flags can have."""

import argparse
import difflib
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from megatron_ttrace.trace.errors import TTraceError, without_secrets

_MOST_ITERATIONS = 1000
MOST_RANKS = 4096
"""The most ranks that ``ttrace`` starts on one machine."""
DEFAULT_RANKS = 8
"""Ranks of a job that is made smaller: three axes of 2. More ranks than that share two cores badly,
fewer would take three jobs for what one does, and miss what only three axes together show."""
_MOST_PATH, _MOST_NAME = 4096, 255
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?"
)


class Parser(argparse.ArgumentParser):
    """A parser of our command lines: errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """See :class:`argparse.ArgumentParser`. Raises ``TTraceError``."""
        from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

        message = clean(without_secrets(message), NOTE_LIMIT)
        raise TTraceError(f"{message} (see {self.prog} --help)")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            # Of --flag=--, which argparse takes for the end of all flags.
            raise argparse.ArgumentError(action, "give a value")
        return super()._get_values(action, arg_strings)


def path(text: str) -> Path:
    """A path, for argparse: ``ArgumentTypeError`` if no file system accepts it."""
    parts = text.split("/")
    printable = ascii(text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}")
    if not text or "\0" in text:
        why = "holds a zero byte" if text else "is empty: is a variable not set?"
        raise argparse.ArgumentTypeError(f"{printable} {why}")
    if len(os.fsencode(text)) >= _MOST_PATH or any(
        len(os.fsencode(part)) > _MOST_NAME for part in parts
    ):
        raise argparse.ArgumentTypeError(f"{printable} is too long for a path")
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"{printable} holds unprintable characters")
    return Path(text)


def path_text(text: str) -> str:
    """As :func:`path`, but text: Megatron's arguments are copied as text."""
    return str(path(text)) if text else text


def integer(least: int = -(1 << 63), most: int = (1 << 63) - 1) -> Callable[[str], int]:
    """For argparse: an integer between two, in ASCII digits."""

    def convert(text: str) -> int:
        value = int(text) if _INTEGER.fullmatch(text) else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!a}: give an integer from {least} to {most}"
            )
        return value

    return convert


def number(text: str) -> float:
    """For argparse: a finite number that is not negative, in ASCII digits."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!a}: give a number from 0")
    return value


def words(text: str) -> tuple[str, ...]:
    """For argparse: several words in one, split as a shell splits them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!a}: close the quote") from error


def word_of(path: os.PathLike[str] | str) -> str:
    """A path as a word that no parser takes for a flag."""
    text = os.fspath(path)
    return os.path.join(os.curdir, text) if text.startswith("-") else text


_OURS = "--ttrace-"


def shown(parser: argparse.ArgumentParser) -> list[str]:
    """The flags that a parser's help shows; others are for our own processes."""
    actions = parser._option_string_actions.items()
    return [name for name, action in actions if action.help is not argparse.SUPPRESS]


def similar(word: str, known: Iterable[str]) -> str:
    """What a mistyped word may have meant, as the end of a sentence."""
    # What all flags of a job begin with makes them alike.
    prefix = _OURS if word.startswith(_OURS) else ""
    names = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
    matches = difflib.get_close_matches(word.removeprefix(prefix), names, n=2)
    meant = " or ".join(prefix + match for match in matches)
    return f"; did you mean {meant}?" if meant else ""


def parse_iterations(text: str) -> tuple[int, ...]:
    """``"1-2,5"`` -> ``(1, 2, 5)``; raises ``TTraceError`` for texts that are not like this."""
    chosen: set[int] = set()
    shown = ascii(text if len(text) <= 40 else f"{text[:40]}...")
    for part in text.split(",", _MOST_ITERATIONS):
        match = re.fullmatch(r" *([0-9]{1,12})(?: *- *([0-9]{1,12}))? *", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else 0
        if first < 1 or last < first or last - first > _MOST_ITERATIONS:
            raise TTraceError(
                f"--ttrace-iterations {shown}: give numbers or ranges from 1, e.g. 1 or 1-2,5, "
                f"of at most {_MOST_ITERATIONS} iterations"
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))
