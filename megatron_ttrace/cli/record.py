# SPDX-License-Identifier: Apache-2.0
"""``ttrace record``: run a job once and keep its trace, to compare other runs with it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_ttrace.cli import command, jobs, training
from megatron_ttrace.errors import ExitCode, TTraceError
from megatron_ttrace.mcore import flags
from megatron_ttrace.mcore.command_line import Command
from megatron_ttrace.processes import apart
from megatron_ttrace.runtime import api
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.sanitise import in_one_line

_EPILOG = """\
examples:
  ttrace record --ttrace-dir before -- torchrun --nproc-per-node 2 pretrain_gpt.py ...
  ttrace check --against before -- torchrun --nproc-per-node 2 pretrain_gpt.py ...

The directory holds the run's own tensors, and its single-device reference, whose replays say how
far rounding may move each of them. A run that differs from its reference is kept, too.

exit code: 0 the trace was kept, 2 it was not
"""


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``record`` command."""
    parser = command.add(
        subparsers,
        "record",
        run,
        summary="run a job once and keep its trace, to compare other runs with it",
        description="Run the traced steps of a training job as ttrace check does, and keep all of "
        "its tensors for ttrace check --against and ttrace diff.",
        epilog=_EPILOG,
    )
    jobs.add_options(parser)
    parser.set_defaults(ttrace_dir="ttrace-record")
    training.add_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run and keep."""
    found = training.command_of(args)
    for name in found.unset:
        os.environ.pop(name, None)
    flags.check_single(args, "nproc_per_node")
    ours, _ = flags.split(found.arguments, jobs.before(args))
    folder = Path(ours.ttrace_dir)
    if (folder / "candidate").exists():
        raise TTraceError(f"{folder} holds a trace already: choose another --ttrace-dir")
    say = command.silent if args.quiet or args.json else command.progress()
    began = time.time()
    report = kept(args, found, say)
    if args.json:
        print(json.dumps(report.summary.to_json(), indent=1))
    else:
        count = len(report.verdicts)
        print(f"ttrace: kept in {folder}: {count} tensors; {own_verdict(report.verdict.value)}")
        from megatron_ttrace.report import wandb

        if line := wandb.left_offline(report.directory, began):
            print(line)
    return ExitCode.EQUIVALENT


def own_verdict(verdict: str) -> str:
    """How a run compares with its own reference, in words."""
    return f"compared with its own single-device reference: {verdict}"


def kept(args: argparse.Namespace, found: Command, say: command.Say) -> api.Report:
    """Check a command in this process, with all its tensors kept.

    Raises:
        TTraceError: when the run has no complete trace.
    """
    args.ttrace_save_candidate = True
    # Too many unchecked tensors are no reason not to keep them.
    report = jobs.checked(args, found, say, settle=False)
    reference = report.directory / "reference"
    if reference.is_symlink():
        # An entry of the cache may be removed at any time.
        target = reference.resolve()
        owned.remove(reference)
        owned.copy(target, reference)
    return report


def parsed(text: str) -> Command:
    """A whole command in one word. Raises ``TTraceError`` when there is no script in it."""
    return training.command_of(
        argparse.Namespace(command="record", recipe=None, command_words=[text])
    )


def run_apart(
    text: str,
    found: Command,
    folder: Path,
    *,
    options: Sequence[str] = (),
    quiet: bool = False,
) -> None:
    """Record a command in a process and an environment of its own.

    Args:
        text: the command, which names the interpreter.
        found: what it is.
        folder: for its trace; an older trace in it is removed.
        options: of ``ttrace record``.
        quiet: print no progress.

    Raises:
        TTraceError: when there is no trace, with the reason.
    """
    if (folder / "candidate").is_dir():
        owned.remove(folder / "candidate")
    words = ["record", "--nproc-per-node", str(jobs.ranks_of(found))]
    words += ["--ttrace-dir", str(folder.resolve()), "--ttrace-no-wandb", *options]
    words += ["--", found.script]
    own = {name: value for name, value in os.environ.items() if name not in found.unset}
    code, said = apart.ttrace(
        apart.interpreter_of(text.split()),
        [*words, *found.arguments],
        {**own, **found.environment},
        quiet=quiet,
    )
    if code:
        raise TTraceError(f"no trace of {in_one_line(text)[:60]!r}: {said}")
