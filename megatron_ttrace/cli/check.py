# SPDX-License-Identifier: Apache-2.0
"""``ttrace check``: the whole check of a training job on one machine."""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from megatron_ttrace.cli import blame as blaming
from megatron_ttrace.cli import command, diff, training
from megatron_ttrace.jobs import flags
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.processes import signals
from megatron_ttrace.jobs.settings import settings_of, split
from megatron_ttrace.saved import api
from megatron_ttrace.trace import ends
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.records import Result
from megatron_ttrace.trace.sanitise import in_one_line

SUMMARY = "check a training job against its single-device reference"
DESCRIPTION = (
    "Run a Megatron training script on this machine and check it. "
    "--ttrace and --ttrace-exit are implied; the script needs no changes."
)
EPILOG = """\
examples:
  ttrace check --nproc-per-node 2 -- launch/pretrain_gpt.py --tensor-model-parallel-size 2 \\
      --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \\
      --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 1 \\
      --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128
  ttrace check --shrink -- torchrun --nproc-per-node 8 --nnodes 128 pretrain_gpt.py ...
  ttrace check --against hf:config.json -- torchrun --nproc-per-node 2 pretrain_gpt.py ...
  ttrace check --against before -- torchrun --nproc-per-node 2 pretrain_gpt.py ...

exit code: 0 equivalent, 1 diverged, 2 could not check, 130 interrupted by Ctrl-C
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    training.add_options(parser)
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="check the smallest job that runs the same code (see ttrace shrink)",
    )
    parser.add_argument(
        "--against",
        metavar="COMMAND|TRACE|hf:CONFIG",
        help="compare with this run instead of a single-device one: a command in quotes, or a "
        "directory of ttrace record (see ttrace diff); with hf:config.json, also compare the "
        "single-device run with that model of transformers",
    )
    parser.add_argument(
        "--known",
        type=flags.path,
        metavar="FILE",
        help="with --against: known differences",
    )
    parser.add_argument(
        "--blame",
        action="store_true",
        help="if it diverges, find which change to Megatron is to blame (see ttrace blame)",
    )
    blaming.add_good(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="do not check again, with modules isolated, where a cause is not known",
    )
    command.add_max_ranks(parser)
    training.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the check and show its report."""
    command_ = training.read(args)
    began = time.time()
    say = command.progress_of(args)
    if args.good is not None and not args.blame:
        raise TTraceError("--good: only with --blame")
    if args.against is not None:
        if args.blame:
            raise TTraceError(
                "--blame: not with --against, which compares two runs of one Megatron"
            )
        if args.shrink:
            raise TTraceError(
                "--against and --shrink: give one of them; ttrace shrink prints the jobs"
            )
        if not api.is_model(args.against):
            return diff.against(args, command_, say)
    elif args.known is not None:
        raise TTraceError("--known: only with --against")
    training.enter(command_)
    reports: list[api.Report] = []
    refused: list[str] = []
    if args.against is not None:
        try:
            reports.extend(diff.with_model(args, command_, say))
        except TTraceError as error:
            refused.append(str(error))
    elif args.shrink:
        reports, refused = _shrunk(args, command_, say)
    else:
        how = {"fork": not args.no_fork, "nproc": args.nproc_per_node, "settle": not args.once}
        reports = [training.check(command_, settings_of(args), say, **how)]
        ranks = args.nproc_per_node or training.ranks_of(command_)
        reports = [_blamed(args, command_, reports[0], ranks, say)]
    if not reports:
        raise TTraceError("\n".join(refused))
    if len(reports) == 1:
        reports = [api.timed(reports[0], time.monotonic() - args.began)]
    if args.json:
        summaries = [report.summary.to_json() for report in reports]
        print(json.dumps(summaries[0] if len(summaries) == 1 else summaries, indent=1))
    else:
        from rich.console import Console

        from megatron_ttrace.report import terminal, wandb

        console, said = Console(), set[str]()
        for report in reports:
            if report is not reports[0]:
                terminal.say(console, "")
            again = command.typed(report.isolating)
            terminal.render(
                report.summary,
                report.verdicts,
                console,
                report.directory,
                again,
                (alone.summary, alone.directory) if (alone := report.isolated) else None,
                said,
            )
            if line := wandb.left_offline(report.directory, began):
                terminal.say(console, line)
    codes = [int(report.verdict.exit_code) for report in reports]
    reasons = [report.summary.reason for report in reports]
    for why in refused:
        print(f"ttrace: {in_one_line(why)}", file=sys.stderr)
        codes.append(ExitCode.COULD_NOT_CHECK)
        reasons.append(why)
    if len(codes) > 1 and args.shrink and not args.json:
        terminal.jobs(console, {answer.name: codes.count(answer) for answer in _SEVERITY})
    code = max(codes, key=_SEVERITY.index)
    for reason in filter(None, reasons):
        ends.write(ends.EndRecord(code=code, at=0, message=reason))
    return code


_SEVERITY = (ExitCode.EQUIVALENT, ExitCode.COULD_NOT_CHECK, ExitCode.DIVERGED)
"""Of several jobs the worst answer counts."""


def _shrunk(
    args: argparse.Namespace, command_: Command, say: command.Say
) -> tuple[list[api.Report], list[str]]:
    """The reports of all small jobs that can be checked, and why others cannot."""
    from rich.console import Console

    from megatron_ttrace.cli import shrink
    from megatron_ttrace.jobs import job
    from megatron_ttrace.jobs.provenance import NODES, SHRUNK
    from megatron_ttrace.jobs.shrink import documents

    scripts.require(command_.script)
    settings, theirs = split(command_.arguments, settings_of(args))
    ranks = command_.ranks or args.nproc_per_node
    large = dataclasses.replace(command_, arguments=tuple(theirs), ranks=ranks)
    folder = settings.directory
    prefix = Path(f"{folder}-data") / training.DATA
    plan = training.shrunk(
        large, args.max_ranks, prefix, device=settings.device, fork=not args.no_fork, say=say
    )
    if not (args.quiet or args.json):
        shrink.show(plan, Console(stderr=True))
    if not args.no_fork:
        # Before the data is written: that imports Megatron, which must be the script's own.
        job.prepare(settings.device, Path(large.script), arguments=theirs)
    documents.write(prefix, plan.jobs[0].arguments)
    reports: list[api.Report] = []
    refused: list[tuple[int, str]] = []
    smalls = training.small(large, plan.jobs, prefix)
    for number, (small_job, (small, file)) in enumerate(zip(plan.jobs, smalls, strict=True), 1):
        ranks = small_job.axes.ranks
        nodes = 2 if large.nodes > 1 and ranks % 2 == 0 else 1
        if len(plan.jobs) > 1:
            settings = dataclasses.replace(settings, directory=folder / str(number))
            say(f"job {number} of {len(plan.jobs)}: {ranks} ranks")
        try:
            report = training.check(
                small,
                dataclasses.replace(settings, small=file),
                say,
                fork=not args.no_fork,
                nproc=ranks,
                settle=not args.once,
                environment={SHRUNK: plan.stands_for(), NODES: str(nodes)},
            )
        except TTraceError as error:
            signals.check()
            refused.append((number, str(error)))
            continue
        reports.append(_blamed(args, small, report, ranks, say, configuration=file))
    return reports, _refusals(refused, len(plan.jobs), folder)


def _refusals(refused: list[tuple[int, str]], jobs: int, folder: Path) -> list[str]:
    """Why jobs cannot be checked, once for all that have the same reason, with the first's log."""
    numbers: dict[str, list[int]] = {}
    for number, why in refused:
        numbers.setdefault(why.replace(f"{folder / str(number)}/", f"{folder}/"), []).append(number)
    lines = []
    for those in numbers.values():
        named = ", ".join(map(str, those[:-1])) + (" and " if those[:-1] else "") + str(those[-1])
        which = f"job{'s' * (len(those) > 1)} {named} of {jobs}: " if jobs > 1 else ""
        which = f"all {jobs} jobs: " if len(those) == jobs > 1 else which
        lines.append(which + dict(refused)[those[0]])
    return lines


def _blamed(
    args: argparse.Namespace,
    command_: Command,
    report: api.Report,
    ranks: int,
    say: command.Say,
    *,
    configuration: Path | None = None,
) -> api.Report:
    """The report of a job that diverges, with the changes to blame if that was asked for."""
    if not args.blame or report.verdict is not Result.DIVERGED:
        return report
    from megatron_ttrace.saved import blame as searching

    settings, arguments = split(command_.arguments, settings_of(args))
    settings = dataclasses.replace(settings, small=configuration or settings.small)
    trial = searching.Trial(
        interpreter=sys.executable,
        arguments=tuple(arguments),
        ranks=ranks,
        settings=dataclasses.replace(settings, directory=report.directory),
        environment={**os.environ, **command_.environment},
        fork=not args.no_fork,
    )
    say("it diverges: looking for the change to blame")
    script = Path(command_.script)
    blame = searching.run_apart(trial, script, args.good, say, quiet=args.quiet or args.json)
    return dataclasses.replace(report, summary=dataclasses.replace(report.summary, blame=blame))
