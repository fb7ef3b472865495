# SPDX-License-Identifier: Apache-2.0
"""What ``check`` and ``shrink`` share: the training command that they are given."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ttrace.jobs import flags, settings
from megatron_ttrace.jobs.commands.command_line import (
    EXAMPLE,
    Command,
    ShellScript,
    is_launcher,
    parse,
)
from megatron_ttrace.trace.errors import TTraceError

if TYPE_CHECKING:
    from megatron_ttrace.jobs.shrink.plan import Job

DATA = "shrunk-text"
"""Name of the data set of small jobs."""


def add_arguments(parser: argparse.ArgumentParser, words: str = "-- COMMAND") -> None:
    """Add what names the training command, last; ``words`` is how the help names it."""
    parser.add_argument(
        "--recipe",
        type=flags.path,
        metavar="FILE",
        help="a model_config.yaml of Megatron-LM's functional tests, instead of a command",
    )
    parser.add_argument(
        "--max-ranks",
        type=flags.integer(1, flags.MOST_RANKS),
        default=flags.DEFAULT_RANKS,
        metavar="N",
        help=f"most ranks of a shrunk job (default {flags.DEFAULT_RANKS})",
    )
    parser.add_argument(
        "command_words",
        nargs=argparse.REMAINDER,
        metavar=words,
        help="training command: torchrun ..., python ..., srun ..., a script and its arguments, "
        "or a shell script",
    )


def command_of(args: argparse.Namespace) -> Command:
    """The training command of a command line.

    Raises:
        TTraceError: when there is none, or more than one.
    """
    if args.recipe is not None:
        if [word for word in args.command_words if word != "--"]:
            raise TTraceError("--recipe FILE and a command: give one of them")
        from megatron_ttrace.jobs.commands import recipe_file

        return recipe_file.read(args.recipe)
    return parsed(args.command_words, args.command, getattr(args, "nproc_per_node", None))


def parsed(words: list[str], user: str, nproc: int | None = None) -> Command:
    """The training command that these words are, perhaps after a ``--``.

    Args:
        words: one may be the text of a whole command.
        user: the command of ours that needs it.
        nproc: number of ranks that is given beside the command.

    Raises:
        TTraceError: when there is no script in them.
    """
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise TTraceError(f"no script given: ttrace {user} -- {EXAMPLE}")
    found = _as_script(words) or parse(words, os.environ)
    if isinstance(found, ShellScript):
        from megatron_ttrace.jobs.commands import shell_script

        found = shell_script.resolve(found)
    if found.uncounted and not nproc:
        raise TTraceError(f"{found.uncounted} leaves the number of ranks open: give the number")
    try:
        flags.path(found.script)
    except argparse.ArgumentTypeError as error:
        raise TTraceError(f"the script {error}") from error
    return found


def _as_script(words: list[str]) -> Command | ShellScript | None:
    """A script by whatever name, if there is such a file in this place; launchers are none."""
    try:
        path = flags.path(words[0])
        if is_launcher(words[0]) or path.suffix == ".sh" or not path.is_file():
            return None
        with path.open("rb") as file:
            first = file.read(512).splitlines()[:1]
    except (argparse.ArgumentTypeError, OSError) as error:
        if len(words) == 1 and len(words[0].split()) > 1:
            return None  # the text of a whole command
        raise TTraceError(f"the script {error}") from error
    line = first[0] if first else b""
    if b"\0" in line:
        return None  # a program
    if line.startswith(b"#!") and b"python" not in line:
        return ShellScript(tuple(words))
    return Command(words[0], tuple(words[1:]))


def checking(command: Command, job: Job, prefix: Path) -> list[str]:
    """The command that checks a small job."""
    from megatron_ttrace.jobs.shrink import documents

    data = documents.arguments(command.script, prefix, job.arguments)
    words = settings.checking(command.script, [*job.arguments, *data], job.axes.ranks)
    changes = [word for name in command.unset for word in ("-u", name)]
    changes += [f"{name}={value}" for name, value in command.environment.items()]
    return [
        *(["env", *changes] if changes else []),
        "ttrace",
        *words,
    ]
