# SPDX-License-Identifier: Apache-2.0
"""What commands share: their parsers, progress lines, and checks before long work."""

import argparse
import json
import os
import shutil
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from megatron_ttrace.jobs import flags
from megatron_ttrace.jobs.settings import FLAGS, Settings
from megatron_ttrace.saved import api
from megatron_ttrace.trace.sanitise import log_line

type Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
type Say = Callable[[str], None]


_FEW = 6
"""Of more choices, an error names those alone that may have been meant."""


class Parser(flags.Parser):
    """The parser of a command: it proposes what a mistyped command or option may have meant."""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """As of :class:`argparse.ArgumentParser`; raises ``TTraceError`` for what is not known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            meant = flags.similar(options[0], flags.shown(self)) if options else ""
            shown = " ".join(options) or f"{len(unknown)} more than this command has"
            self.error(f"unrecognized arguments: {shown}{meant}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [str(choice) for choice in action.choices or ()]
            if len(choices) > _FEW:
                error.message = f"there is no {str(value)!r}"
            error.message += flags.similar(str(value), choices)
            raise


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, int]]:
    """All flags of a parser and of its commands, and whether they have a value."""
    for action in parser._actions:
        yield from ((flag, int(action.nargs != 0)) for flag in action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for inner in set(action.choices.values()):
                yield from options(inner)


def add_evaluation(subparsers: Subparsers) -> Subparsers:
    """Add ``ttrace eval``, and return what its commands are added to."""
    parser = subparsers.add_parser(
        "eval",
        help="evaluate the checker itself: known bugs, injected faults, healthy jobs",
        description="Evaluate the checker itself.",
        epilog="example:\n  ttrace eval bugs run 01 11",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser.add_subparsers(required=True, metavar="COMMAND")


def typed(words: Sequence[str]) -> list[str]:
    """A ``ttrace`` command as it works in the user's shell, which may not find ``ttrace``."""
    installed = Path(sysconfig.get_path("scripts"), "ttrace")
    on_path = shutil.which("ttrace")
    is_this = on_path and Path(on_path).resolve() == installed.resolve()
    if not words or not installed.is_file() or is_this:
        return list(words)
    return [str(near(installed)), *words[1:]]


def near(path: Path) -> Path:
    """A path as a person would type it: relative, if it is below the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def add(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str = "",
    epilog: str,
) -> argparse.ArgumentParser:
    """Add a command, or an action of one.

    ``run`` returns the exit code. ``summary`` is its line in the list of commands, and by default
    the description, which begins its ``--help``. ``epilog`` ends that: an example, and the exit
    codes.
    """
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description or f"{summary[0].upper()}{summary[1:]}.", 80),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_module(subparsers: Subparsers, name: str) -> None:
    """Add the command that a module of this package has: ``run``, and what its parser needs.

    That is ``SUMMARY``, ``EPILOG``, perhaps ``DESCRIPTION``, and ``configure`` for its arguments.
    """
    module = import_module(f"megatron_ttrace.cli.{name}")
    description = getattr(module, "DESCRIPTION", "")
    texts = {"summary": module.SUMMARY, "description": description, "epilog": module.EPILOG}
    module.configure(add(subparsers, name, module.run, **texts))


def add_directory(parser: argparse._ActionsContainer, default: str) -> None:
    """Add ``--directory``."""
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help=f"working directory (default {default})",
    )


def add_max_ranks(parser: argparse.ArgumentParser) -> None:
    """Add ``--max-ranks``."""
    parser.add_argument(
        "--max-ranks",
        type=flags.integer(1, flags.MOST_RANKS),
        default=flags.DEFAULT_RANKS,
        metavar="N",
        help=f"most ranks of a shrunk job (default {flags.DEFAULT_RANKS})",
    )


def add_seconds(parser: argparse.ArgumentParser) -> None:
    """Add ``--seconds``."""
    parser.add_argument(
        "--seconds",
        type=flags.number,
        default=600.0,
        metavar="SECONDS",
        help="end a job after this time (default 600)",
    )


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add what commands that compare traces know of their answer and its report."""
    share, name = FLAGS["allow_unchecked"], "allow_unchecked"
    share.add(parser, share.alias, share.name, default=Settings.allow_unchecked, dest=name)
    parser.add_argument(
        "--wandb",
        action="store_true",
        help="also log the report to W&B, online if a key is configured",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def answered(report: api.Report, *, as_json: bool) -> int:
    """Print the summary, if it is wanted as JSON; returns the exit code."""
    if as_json:
        print(json.dumps(report.summary.to_json(), indent=1))
    return int(report.verdict.exit_code)


def progress(began: float | None = None) -> Say:
    """A function that writes a line to standard error, with the seconds since ``began``.

    The line may quote foreign text: it is made harmless. ``began`` is on the clock of
    ``time.monotonic()``, by default now.
    """
    start = time.monotonic() if began is None else began

    def say(line: str) -> None:
        # In one piece: a signal's last line must not begin in the middle of this one.
        sys.stderr.write(f"[{time.monotonic() - start:5.1f} s] {log_line(line)}\n")
        sys.stderr.flush()

    return say


def progress_of(args: argparse.Namespace) -> Say:
    """:func:`progress` since the command began; nothing with ``--quiet`` or ``--json``."""
    return silent if args.quiet or args.json else progress(args.began)


def process_began() -> float:
    """When this process was started, on the clock of ``time.monotonic()``; without /proc, now."""
    now = time.monotonic()
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        # After the name, which may hold anything, the 20th field: ticks since the machine started.
        ticks = int(text.rpartition(")")[2].split()[19])
        since = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - since


def silent(line: str) -> None:
    """In place of :func:`progress`, to print nothing."""
    del line
