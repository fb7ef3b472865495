# SPDX-License-Identifier: Apache-2.0
"""``ttrace resume``: whether a job that is restarted from its checkpoint goes on as before."""

import argparse
import dataclasses
import json
from pathlib import Path

from megatron_ttrace.cli import command, training
from megatron_ttrace.jobs import flags
from megatron_ttrace.jobs.settings import FLAGS, Settings, split
from megatron_ttrace.trace import ends

SUMMARY = "check that a job goes on as before when it is restarted from its checkpoint"
EPILOG = """\
examples:
  ttrace resume -- torchrun --nproc-per-node 2 pretrain_gpt.py ...
  ttrace resume --into "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2" \\
      --into "--nproc-per-node 1" -- torchrun --nproc-per-node 2 pretrain_gpt.py ...

The job trains and saves with its own options, but into --directory, and goes on for 2 steps.
Then it is restarted from this checkpoint, in the same layout and in those of --into. The loaded
state must be the saved one, to the bit; so must the following steps in the same layout, while in
others rounding is tolerated. --save and --load of the command are not written to.

exit code: 0 every restart goes on as before, 1 one does not, 2 could not check
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--steps",
        type=flags.integer(1, 1000),
        default=2,
        metavar="K",
        help="steps before the checkpoint (default 2)",
    )
    parser.add_argument(
        "--into",
        action="append",
        default=[],
        metavar='"FLAGS"',
        help="also restart in this layout: flags of the script that differ, and --nproc-per-node; "
        "can be repeated",
    )
    command.add_directory(parser, "ttrace-resume")
    training.add_running(parser, "answer")
    timeout = FLAGS["timeout"]
    timeout.add(parser, timeout.alias, timeout.name, default=Settings.timeout, dest="timeout")
    training.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run all runs, and show the answer."""
    from megatron_ttrace.saved import restarts

    job = training.command_of(args)
    folder: Path = args.directory
    settings, theirs = split(job.arguments, Settings(directory=folder, timeout=args.timeout))
    say = command.progress_of(args)
    resumed = restarts.resume(
        dataclasses.replace(job, arguments=tuple(theirs)),
        settings.unlogged(folder),
        nproc=args.nproc_per_node or training.ranks_of(job),
        steps=args.steps,
        into=args.into,
        fork=not args.no_fork,
        say=say,
    )
    if args.json:
        print(json.dumps(resumed.to_json(), indent=1))
    else:
        from rich.console import Console

        from megatron_ttrace.report import resumed as report

        report.render(resumed, Console(), folder)
    code = int(resumed.verdict.exit_code)
    if resumed.reason:
        ends.write(ends.EndRecord(code=code, at=0, message=resumed.reason))
    return code
