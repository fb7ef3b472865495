# SPDX-License-Identifier: Apache-2.0
"""What commands that take a training command share: how it is read, and checked here."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags, settings
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands.command_line import (
    EXAMPLE,
    Command,
    ShellScript,
    is_launcher,
    parse,
)
from megatron_ttrace.saved import api
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError

if TYPE_CHECKING:
    from megatron_ttrace.jobs.shrink.plan import Job, Plan

type Small = tuple[Command, Path | None]
"""The command of a small job, and its ``--ttrace-small``."""

DATA = "shrunk-text"
"""Name of the data set of small jobs."""


def add_arguments(parser: argparse.ArgumentParser, words: str = "-- COMMAND") -> None:
    """Add what names the training command, last; ``words`` is how the help names it."""
    parser.add_argument(
        "--recipe",
        type=flags.path,
        metavar="FILE",
        help="a configuration of Megatron-LM's tests or moe_recipes, instead of a command",
    )
    parser.add_argument(
        "command_words",
        nargs=argparse.REMAINDER,
        metavar=words,
        help="training command: torchrun ..., python ..., srun ..., a script and its arguments, "
        "or a shell script",
    )


def command_of(args: argparse.Namespace) -> Command:
    """As of :func:`read`; this process has the variables that the command sets."""
    command_ = read(args)
    enter(command_)
    return command_


def enter(command_: Command) -> None:
    """Set a command's variables: they decide which Megatron is imported here, and how."""
    for name in command_.unset:
        os.environ.pop(name, None)
    os.environ.update(command_.environment)


def read(args: argparse.Namespace) -> Command:
    """The training command of a command line.

    Raises ``TTraceError`` when there is no command, or more than one.
    """
    words: list[str] = args.command_words
    words = words[1:] if words[:1] == ["--"] else words
    if args.recipe is not None:
        if words:
            raise TTraceError("--recipe FILE and a command: give one of them")
        from megatron_ttrace.jobs.commands import recipe_file

        return recipe_file.read(args.recipe)
    return parsed(words, args.command, getattr(args, "nproc_per_node", None))


def parsed(words: list[str], user: str, nproc: int | None = None) -> Command:
    """The training command that these words are.

    One word may be the text of a whole command. ``user`` is the command of ours that needs it, and
    ``nproc`` the number of ranks that is given beside it. Raises ``TTraceError`` when there is no
    script in the words.
    """
    if not words:
        raise TTraceError(f"no script given: ttrace {user} -- {EXAMPLE}")
    command_ = _as_script(words) or parse(words, os.environ)
    if isinstance(command_, ShellScript):
        from megatron_ttrace.jobs.commands import shell_script

        command_ = shell_script.resolve(command_)
    if Path(command_.folder, command_.script).is_file():
        script = os.path.join(command_.folder, command_.script)
        command_ = dataclasses.replace(command_, script=script)
    if command_.uncounted and not nproc:
        raise TTraceError(f"{command_.uncounted} leaves the number of ranks open: give the number")
    try:
        flags.path(command_.script)
    except argparse.ArgumentTypeError as error:
        raise TTraceError(f"the script {error}") from error
    return command_


def _as_script(words: list[str]) -> Command | ShellScript | None:
    """A script by whatever name, if there is such a file here that does not launch scripts."""
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


def shrunk(
    command_: Command,
    most: int,
    prefix: Path,
    *,
    device: str = "auto",
    fork: bool = True,
    say: command.Say = command.silent,
) -> Plan:
    """The small jobs, of at most ``most`` ranks, of a command.

    A script of Megatron-Bridge runs until it trains: on ``device`` (``--ttrace-device``), with
    ``fork`` and ``say`` as of :func:`check`. ``prefix`` is of the small jobs' data. Raises
    ``TTraceError`` when the command cannot be shrunk.
    """
    from megatron_ttrace.jobs import job
    from megatron_ttrace.jobs.shrink import documents, plan

    script = Path(command_.script)
    if not scripts.imports_bridge(script):
        return plan.shrink(command_, most)
    documents.write_tuning(prefix)
    how = settings.Settings(directory=prefix.parent / "configuration", device=device)
    fork = fork and job.prepare(device, script, arguments=command_.arguments)
    planning = job.Job(script, command_.arguments, 1, how, dict(command_.environment))
    words = job.configuration(planning, fork=fork, say=say)
    small_ = plan.of_flags(dataclasses.replace(command_, arguments=tuple(words)), most)
    return dataclasses.replace(small_, command=command_)


def small(command_: Command, jobs: Sequence[Job], prefix: Path) -> list[Small]:
    """The commands of small jobs; what their configurations become is written to files.

    Raises ``TTraceError`` when these cannot be written.
    """
    from megatron_ttrace.jobs.shrink import bridge, documents

    if not scripts.imports_bridge(command_.script):
        data = documents.arguments(command_.script, prefix, jobs[0].arguments)
        arguments = [(*job.arguments, *data) for job in jobs]
        return [(dataclasses.replace(command_, arguments=words), None) for words in arguments]
    data = [bridge.DATA, str(documents.chats(prefix).absolute())]
    made: list[Small] = []
    for number, job in enumerate(jobs, 1):
        file = prefix.with_name(f"configuration-{number}.txt").absolute()
        owned.write(file, [shlex.join([*job.arguments, *data])])
        made.append((command_, file))
    return made


def checking(small_: Small, ranks: int) -> list[str]:
    """The command that checks a small job on so many ranks."""
    command_, file = small_
    how = settings.Settings(small=file) if file else None
    words = settings.checking(command_.script, command_.arguments, ranks, how)
    changes = [word for name in command_.unset for word in ("-u", name)]
    changes += [f"{name}={value}" for name, value in command_.environment.items()]
    return [*(["env", *changes] if changes else []), "ttrace", *words]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``check`` and ``record`` know of how a job is run and checked."""
    add_running(parser, "summary")
    settings.add_arguments(parser, aliases=True)


def add_running(parser: argparse.ArgumentParser, answer: str) -> None:
    """Add how a job is run, and its ``answer`` shown."""
    parser.add_argument(
        "--nproc-per-node",
        type=flags.integer(1, flags.MOST_RANKS),
        default=None,
        metavar="N",
        help="number of ranks (default: as the command starts, else 1)",
    )
    parser.add_argument("--json", action="store_true", help=f"print the {answer} as JSON")
    parser.add_argument(
        "--no-fork",
        action="store_true",
        help="start every rank as a new process instead of forking it",
    )
    parser.add_argument("--quiet", action="store_true", help="do not print progress")


def check(
    command_: Command,
    how: settings.Settings,
    say: command.Say,
    *,
    fork: bool = True,
    nproc: int | None = None,
    settle: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> api.Report:
    """Check a command in this process; flags of ours among its arguments override ``how``.

    ``nproc`` is by default what the command starts, ``settle`` as of ``api.run_check``,
    ``environment`` has further variables of the ranks. Raises ``TTraceError`` when there is no
    report.
    """
    return api.run_check(
        Path(command_.script),
        command_.arguments,
        how,
        nproc=nproc or ranks_of(command_),
        environment={**command_.environment, **environment},
        fork=fork,
        say=say,
        settle=settle,
    )


def ranks_of(command_: Command) -> int:
    """How many ranks a command that is checked as it is starts on this machine.

    Raises ``TTraceError`` when it is for several machines.
    """
    if command_.nodes > 1:
        raise TTraceError(
            f"the command is for {command_.nodes} machines: add --shrink to check a small job that "
            "runs the same code, or --nproc-per-node N to run it here"
        )
    return command_.ranks or 1
