# SPDX-License-Identifier: Apache-2.0
"""``ttrace check``: the whole check of a training job on one machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_ttrace.cli import command, training
from megatron_ttrace.errors import ExitCode, TTraceError
from megatron_ttrace.mcore import flags
from megatron_ttrace.mcore.command_line import Command
from megatron_ttrace.runtime import api

_EPILOG = """\
examples:
  ttrace check --nproc-per-node 2 -- launch/pretrain_gpt.py --tensor-model-parallel-size 2 \\
      --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \\
      --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 1 \\
      --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128
  ttrace check --shrink -- torchrun --nproc-per-node 8 --nnodes 128 pretrain_gpt.py ...

exit code: 0 equivalent, 1 diverged, 2 could not check, 130 interrupted by Ctrl-C
"""


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``check`` command."""
    parser = command.add(
        subparsers,
        "check",
        run,
        summary="check a training job against its single-device reference",
        description="Run a Megatron training script on this machine and check it. "
        "--ttrace and --ttrace-exit are implied; the script needs no changes.",
        epilog=_EPILOG,
    )
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
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="check the smallest job that runs the same code (see ttrace shrink)",
    )
    training.add_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the check and show its report."""
    command_ = training.command_of(args)
    for name in command_.unset:
        os.environ.pop(name, None)
    flags.check_single(args, "nproc_per_node")
    say = command.silent if args.quiet or args.json else command.progress()
    if args.shrink:
        reports = _shrunk(args, command_, say)
    else:
        nproc = args.nproc_per_node or _ranks(command_)
        reports = [_check(args, command_, command_.arguments, nproc, before(args), say)]
    if args.json:
        found = [report.summary.to_json() for report in reports]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
    else:
        from rich.console import Console

        from megatron_ttrace.report import terminal

        for report in reports:
            terminal.render(
                report.summary,
                report.verdicts,
                Console(),
                report.directory,
                report.isolating,
                (alone.summary, alone.directory) if (alone := report.isolated) else None,
            )
    return max((int(report.verdict.exit_code) for report in reports), key=_SEVERITY.index)


_SEVERITY = (ExitCode.EQUIVALENT, ExitCode.COULD_NOT_CHECK, ExitCode.DIVERGED)
"""Of several jobs the worst answer counts."""


def _check(
    args: argparse.Namespace,
    command_: Command,
    arguments: Sequence[str],
    nproc: int,
    ours: argparse.Namespace,
    say: command.Say,
    **environment: str,
) -> api.Report:
    return api.run_check(
        Path(command_.script),
        arguments,
        ours,
        nproc=nproc,
        environment={**command_.environment, **environment},
        fork=not args.no_fork,
        say=say,
    )


def _ranks(command_: Command) -> int:
    """Of a command that is checked as it is: on this machine.

    Raises:
        TTraceError: when it is for several machines.
    """
    if command_.nodes > 1:
        raise TTraceError(
            f"the command is for {command_.nodes} machines: add --shrink to check a small job that "
            "runs the same code, or --nproc-per-node N to run it here"
        )
    return command_.ranks or 1


def _shrunk(args: argparse.Namespace, command_: Command, say: command.Say) -> list[api.Report]:
    """Check the small jobs, one after the other."""
    from rich.console import Console

    from megatron_ttrace.cli import shrink
    from megatron_ttrace.mcore.shrink import documents, plan
    from megatron_ttrace.processes import job as jobs
    from megatron_ttrace.runtime import PRELOADED
    from megatron_ttrace.runtime.requirements import SHRUNK

    ours, theirs = flags.split(command_.arguments, before(args))
    large = dataclasses.replace(command_, arguments=tuple(theirs))
    found = plan.shrink(large, args.max_ranks)
    if not (args.quiet or args.json):
        shrink.show(found, Console(stderr=True))
    folder = Path(ours.ttrace_dir)
    prefix = folder.with_name(f"{folder.name}-data") / training.DATA
    data = documents.arguments(large.script, prefix)
    if not args.no_fork:
        # Before the data is written: that imports Megatron, which must be the script's own.
        jobs.prepare(ours.ttrace_device, Path(large.script), modules=PRELOADED, arguments=theirs)
    documents.write(prefix)
    reports = []
    for number, job in enumerate(found.jobs, 1):
        if len(found.jobs) > 1:
            ours.ttrace_dir = str(folder / str(number))
            say(f"job {number} of {len(found.jobs)}: {job.axes.ranks} ranks")
        words = [*job.arguments, *data]
        told = {SHRUNK: found.told()}
        reports.append(_check(args, large, words, job.axes.ranks, ours, say, **told))
    return reports


def before(args: argparse.Namespace) -> argparse.Namespace:
    """Our flags before the script; those among its arguments override them."""
    return argparse.Namespace(
        **{name: value for name, value in vars(args).items() if name.startswith("ttrace")}
    )
