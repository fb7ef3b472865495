# SPDX-License-Identifier: Apache-2.0
"""What ``check``, ``record`` and ``diff`` share: how a job is run and checked in this process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ttrace.cli import command
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore import flags
from megatron_ttrace.mcore.command_line import Command
from megatron_ttrace.runtime import api


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``check`` and ``record`` know of how a job is run and checked."""
    parser.add_argument(
        "--nproc-per-node",
        type=flags.integer(1, flags.MOST_RANKS),
        default=None,
        metavar="N",
        help="number of ranks (default: as the command starts, else 1)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--no-fork",
        action="store_true",
        help="start every rank as a new process instead of forking it",
    )
    parser.add_argument("--quiet", action="store_true", help="do not print progress")
    flags.add_arguments(parser)
    parser.add_argument(
        "--timeout",
        dest="ttrace_timeout",
        type=flags.number,
        default=argparse.SUPPRESS,
        metavar="SECONDS",
        help="the same as --ttrace-timeout: time limit for the reference run, and for ranks that "
        f"write nothing (default {flags.DEFAULT_TIMEOUT:.0f})",
    )
    parser.add_argument(
        "--allow-unchecked",
        dest="ttrace_allow_unchecked",
        type=flags.number,
        default=argparse.SUPPRESS,
        metavar="SHARE",
        help="the same as --ttrace-allow-unchecked",
    )


def checked(args: argparse.Namespace, command_: Command, say: command.Say) -> api.Report:
    """Check a command as it is. Raises ``TTraceError``."""
    nproc = args.nproc_per_node or ranks_of(command_)
    return check(args, command_, command_.arguments, nproc, before(args), say)


def check(
    args: argparse.Namespace,
    command_: Command,
    arguments: Sequence[str],
    nproc: int,
    ours: argparse.Namespace,
    say: command.Say,
    **environment: str,
) -> api.Report:
    """Check a job of ``nproc`` ranks: ``command_`` with these arguments and these flags of ours."""
    return api.run_check(
        Path(command_.script),
        arguments,
        ours,
        nproc=nproc,
        environment={**command_.environment, **environment},
        fork=not args.no_fork,
        say=say,
    )


def ranks_of(command_: Command) -> int:
    """How many ranks a command that is checked as it is starts on this machine.

    Raises:
        TTraceError: when it is for several machines.
    """
    if command_.nodes > 1:
        raise TTraceError(
            f"the command is for {command_.nodes} machines: add --shrink to check a small job that "
            "runs the same code, or --nproc-per-node N to run it here"
        )
    return command_.ranks or 1


def before(args: argparse.Namespace) -> argparse.Namespace:
    """Our flags before the script; those among its arguments override them."""
    return argparse.Namespace(
        **{name: value for name, value in vars(args).items() if name.startswith("ttrace")}
    )
