# SPDX-License-Identifier: Apache-2.0
"""What commands share: their parsers, progress lines, and checks before long work."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ttrace.errors import TTraceError

type Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
type Say = Callable[[str], None]


def add(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    aliases: tuple[str, ...] = (),
    summary: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """Add a command to ``ttrace``, or an action to a command.

    Args:
        subparsers: of ``ttrace`` or of the command.
        name: of the command or action.
        run: runs it and returns the exit code.
        aliases: further names of it.
        summary: its line in the list of commands.
        description: the first paragraph of its ``--help``.
        epilog: the end of its ``--help``: an example, and the exit codes.
    """
    parser = subparsers.add_parser(
        name,
        aliases=aliases,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_directory(parser: argparse._ActionsContainer, default: str) -> None:
    """Add ``--directory``."""
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help=f"working directory (default {default})",
    )


def numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """For argparse: integers of at least ``least``, separated by commas."""

    def convert(text: str) -> tuple[int, ...]:
        try:
            found = tuple(int(word) for word in text.split(","))
        except ValueError:
            found = ()
        if not found or min(found) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give numbers from {least}, e.g. 4,16,64")
        return found

    return convert


def progress() -> Say:
    """A function that writes a line to standard error, with the seconds since this call."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {line}", file=sys.stderr, flush=True)

    return say


def silent(line: str) -> None:
    """In place of :func:`progress`, to print nothing."""
    del line


def require_writable(flag: str, file: Path | None) -> None:
    """Create the file of a flag, if it was given: before the long work, not after it.

    Raises:
        TTraceError: when that fails.
    """
    try:
        if file is not None:
            file.touch()
    except OSError as error:
        raise TTraceError(f"{flag} {file} is not writable ({error.strerror})") from error


def in_one_line(error: object) -> str:
    """The text of an error, which may quote a log, as one harmless line."""
    from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

    return clean(" / ".join(str(error).splitlines()), NOTE_LIMIT)
