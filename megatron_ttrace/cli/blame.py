# SPDX-License-Identifier: Apache-2.0
"""``ttrace blame``: which of the user's changes to Megatron make a job diverge."""

import argparse
import os

from megatron_ttrace.cli import command, training
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.jobs.settings import settings_of, split

SUMMARY = "find which of your changes to Megatron make a job diverge"
EPILOG = """\
examples:
  ttrace blame -- torchrun --nproc-per-node 2 pretrain_gpt.py ...
  ttrace blame --good origin/main -- torchrun --nproc-per-node 2 pretrain_gpt.py ...
  ttrace blame --good ../Megatron-LM-0.19.0 -- python pretrain_gpt.py ...

The Python lines in which your Megatron differs from a good one, committed or not, are divided into
hunks. Checks with some of them left out find the smallest set with which the job diverges and
without which it does not. Your files are only read: other checks run in a copy in DIR-blame, where
DIR is --ttrace-dir.

exit code: 0 equivalent, so nothing is to blame; 1 diverged; 2 could not check
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_good(parser)
    training.add_options(parser)
    training.add_arguments(parser)


def add_good(parser: argparse.ArgumentParser) -> None:
    """Add ``--good``."""
    parser.add_argument(
        "--good",
        metavar="REF|DIR",
        help="the Megatron to compare yours with: a commit of its checkout, or a directory "
        "(default: the last commit in common with a release, or the installed one of its version)",
    )


def run(args: argparse.Namespace) -> int:
    """Search, and show the report."""
    from rich.console import Console

    from megatron_ttrace.jobs import overlay
    from megatron_ttrace.report import terminal
    from megatron_ttrace.saved import blame

    command_ = training.command_of(args)
    settings, arguments = split(command_.arguments, settings_of(args))
    say = command.progress_of(args)
    script = scripts.require(command_.script)
    interpreter = apart.interpreter_of(command_)
    tree = overlay.Tree.of(script)
    difference = overlay.difference(tree, args.good)
    trial = blame.Trial(
        interpreter=interpreter,
        arguments=tuple(arguments),
        ranks=args.nproc_per_node or training.ranks_of(command_),
        settings=settings,
        environment=dict(os.environ),
        fork=not args.no_fork,
    )
    say(f"comparing {command.near(tree.packages)} with {difference.since}")
    report = blame.blame(tree, difference, trial, say)
    if not args.json:
        terminal.render(report.summary, report.verdicts, Console(), report.directory)
    return command.answered(report, as_json=args.json)
