# SPDX-License-Identifier: Apache-2.0
"""What ``check``, ``record`` and ``diff`` share: how a job is run and checked in this process."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.settings import Settings, add_arguments
from megatron_ttrace.saved import api
from megatron_ttrace.trace.errors import TTraceError


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
    add_arguments(parser, aliases=True)


def check(
    command_: Command,
    settings: Settings,
    say: command.Say,
    *,
    fork: bool = True,
    nproc: int | None = None,
    settle: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> api.Report:
    """Check a command in this process.

    Args:
        command_: with flags of ours among its arguments, perhaps; they override ``settings``.
        settings: of the check.
        say: called with each line of progress.
        fork: fork the ranks, where that is possible.
        nproc: number of ranks; by default as many as the command starts.
        settle: as of ``api.run_check``.
        environment: further variables of the ranks.

    Raises:
        TTraceError: when there is no report.
    """
    return api.run_check(
        Path(command_.script),
        command_.arguments,
        settings,
        nproc=nproc or ranks_of(command_),
        environment={**command_.environment, **environment},
        fork=fork,
        say=say,
        settle=settle,
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
