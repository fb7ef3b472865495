# SPDX-License-Identifier: Apache-2.0
"""``ttrace shrink``: the smallest job that runs the same code as a large one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ttrace.cli import command, training
from megatron_ttrace.jobs import flags
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.trace.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_ttrace.jobs.shrink.plan import Plan

SUMMARY = "print the smallest job that runs the same code as a large one"
EPILOG = """\
examples:
  ttrace shrink -- torchrun --nproc-per-node 8 --nnodes 128 pretrain_gpt.py \\
      --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --num-layers 96 ...
  ttrace shrink -- bash examples/gpt3/train_gpt3_175b_distributed.sh CKPT LOGS VOCAB MERGES DATA
  ttrace shrink --recipe tests/functional_tests/test_cases/gpt/.../model_config.yaml

Flags that decide which code runs are kept. Sizes shrink, axes above 1 become 2, and the data
becomes generated text. If all axes do not fit --max-ranks, several jobs cover all pairs of axes.
'ttrace check --shrink' runs the jobs.

exit code: 0 shrunk, 2 the command cannot be shrunk
"""

_LONGEST = 40
"""Characters of a flag that are printed on one line."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--data",
        type=flags.path,
        default=Path("ttrace-data") / training.DATA,
        metavar="PREFIX",
        help="data set of the small job; written if absent (default ttrace-data/shrunk-text)",
    )
    command.add_max_ranks(parser)
    training.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from megatron_ttrace.jobs.shrink import documents

    command_ = training.command_of(args)
    scripts.require(command_.script)
    plan = training.shrunk(command_, args.max_ranks, args.data)
    smalls = training.small(plan.command, plan.jobs, args.data)
    commands = [
        (job, training.checking(small, job.axes.ranks))
        for job, small in zip(plan.jobs, smalls, strict=True)
    ]
    documents.write(args.data, plan.jobs[0].arguments)
    if args.json:
        answer = {
            "jobs": [{"ranks": job.axes.ranks, "command": words} for job, words in commands],
            "changes": [[row.flag, row.was, row.now, row.why] for row in plan.rows],
            "kept": list(plan.kept),
            "lost": list(plan.lost),
        }
        print(json.dumps(answer))
        return ExitCode.EQUIVALENT
    from rich.console import Console

    from megatron_ttrace.report import terminal

    show(plan, Console())
    for job, words in commands:
        spread = ", ".join(f"{name} {getattr(job.axes, name)}" for name in job.axes.spread())
        print(f"\n# {job.axes.ranks} ranks{f': {spread}' if spread else ''}")
        print("\n".join(terminal.shell_lines(words, 80)))
    return ExitCode.EQUIVALENT


def _broken(flag: str) -> str:
    """A row's flags, where a name that leaves no width for other columns is broken at a hyphen."""
    words = flag.split(" ")
    for number, word in enumerate(words):
        if len(word) > _LONGEST:
            at = word.rindex("-", 0, _LONGEST) + 1
            words[number] = f"{word[:at]}\n{word[at:]}"
    return " ".join(words)


def show(plan: Plan, console: Console) -> None:
    """Print what becomes of a job: a table that fits 80 columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table("flag", "was", "is", "why", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    # A name that is cut cannot be searched for; several names in a cell are wrapped between them.
    flags = [_broken(row.flag) for row in plan.rows]
    table.columns[0].width = max((len(word) for flag in flags for word in flag.split()), default=0)
    width = console.width - table.columns[0].width - 6
    for column, share in zip(table.columns[1:], (4, 4, 2), strict=True):
        column.width = max(8, width // share)
    for row, flag in zip(plan.rows, flags, strict=True):
        was = row.was or ("(given)" if row.now is None else "-")
        now = "(gone)" if row.now is None else row.now
        table.add_row(*map(Text, (flag, was, now or "(on)", row.why)))
    console.print(table)
    console.print(f"flags kept as they are: {len(plan.kept)}", markup=False, highlight=False)
    for lost in plan.lost:
        console.print(f"not kept: {lost}", markup=False, highlight=False, style="yellow")
