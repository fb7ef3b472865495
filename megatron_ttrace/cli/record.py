# SPDX-License-Identifier: Apache-2.0
"""``ttrace record``: run a job once and keep its trace, to compare other runs with it."""

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path

from megatron_ttrace.cli import command, training
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.jobs.settings import Settings, checking, settings_of, split
from megatron_ttrace.saved import api
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.sanitise import in_one_line

SUMMARY = "run a job once and keep its trace, to compare other runs with it"
EPILOG = """\
examples:
  ttrace record --ttrace-dir before -- torchrun --nproc-per-node 2 pretrain_gpt.py ...
  ttrace check --against before -- torchrun --nproc-per-node 2 pretrain_gpt.py ...

The directory holds the run's tensors and its single-device reference, whose replays show how
far rounding may move each of them. A run that differs from its reference is kept, too.

exit code: 0 the trace was kept, 2 it was not
"""
_DEFAULTS = Settings(directory=Path("ttrace-record"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    training.add_options(parser)
    training.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run and keep."""
    job = training.command_of(args)
    settings, theirs = split(job.arguments, settings_of(args, _DEFAULTS))
    job = dataclasses.replace(job, arguments=tuple(theirs))
    folder = settings.directory
    if (folder / "candidate").exists():
        raise TTraceError(f"{folder} holds a trace already: choose another --ttrace-dir")
    say = command.progress_of(args)
    began = time.time()
    report = kept(job, settings, say, fork=not args.no_fork, nproc=args.nproc_per_node)
    if args.json:
        print(json.dumps(report.summary.to_json(), indent=1))
    else:
        count = len(report.verdicts)
        print(
            f"ttrace: kept in {folder}: {count} tensors; compared with its own "
            f"single-device reference: {report.verdict.value}"
        )
        from megatron_ttrace.report import wandb

        if line := wandb.left_offline(report.directory, began):
            print(line)
    return ExitCode.EQUIVALENT


def kept(
    job: Command, settings: Settings, say: command.Say, *, fork: bool, nproc: int | None
) -> api.Report:
    """Check a command in this process as ``training.check`` does, with all its tensors kept.

    Raises ``TTraceError`` when the run has no complete trace.
    """
    settings = dataclasses.replace(settings, save_candidate=True)
    # Tensors are kept even if too many of them are unchecked.
    report = training.check(job, settings, say, fork=fork, nproc=nproc, settle=False)
    reference = report.directory / "reference"
    if reference.is_symlink():
        # An entry of the cache may be removed at any time.
        target = reference.resolve()
        owned.remove(reference)
        owned.copy(target, reference)
    return report


def run_apart(text: str, job: Command, settings: Settings, *, quiet: bool) -> None:
    """Record a command with the Python that it names, in a process and environment of its own.

    An older trace in the directory of the settings is removed. Raises ``TTraceError`` when there
    is no trace, with the reason.
    """
    folder = settings.directory.resolve()
    if (folder / "candidate").is_dir():
        owned.remove(folder / "candidate")
    settings, theirs = split(job.arguments, settings)
    ranks = training.ranks_of(job)
    words = checking(job.script, theirs, ranks, settings.unlogged(folder), command="record")
    inherited = {name: value for name, value in os.environ.items() if name not in job.unset}
    environment = {**inherited, **job.environment}
    interpreter = apart.interpreter_of(job)
    code, reason = apart.ttrace(interpreter, words, environment, quiet=quiet)
    if code:
        raise TTraceError(f"no trace of {in_one_line(text)[:60]!r}: {reason}")
