# SPDX-License-Identifier: Apache-2.0
"""``ttrace diff``: any two runs against each other."""

import argparse
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_ttrace.cli import command, record, training
from megatron_ttrace.jobs import flags
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.script import imports_bridge
from megatron_ttrace.jobs.settings import Settings, settings_of, split
from megatron_ttrace.mcore.options.decisions import APART, NARROW
from megatron_ttrace.saved import api
from megatron_ttrace.trace import ends
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.sanitise import in_one_line

SUMMARY = "compare two runs: layouts, Megatron versions, implementations, precisions"
DESCRIPTION = "Compare two runs tensor by tensor, with tolerances from their references' replays."
EPILOG = """\
examples:
  ttrace diff "torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2 ..." \\
              "torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-model-parallel-size 2 ..."
  ttrace diff "old/bin/torchrun --nproc-per-node 2 old/Megatron-LM/pretrain_gpt.py ..." \\
              "new/bin/torchrun --nproc-per-node 2 new/Megatron-LM/pretrain_gpt.py ..."
  ttrace diff before ttrace-out
  ttrace diff hf:config.json ttrace-out

A command runs with the Python that it names (or that is beside its torchrun), and with the Megatron
that its script imports. A trace is the directory of ttrace record, or of a check that ran with
--ttrace-save-candidate. A takes the place of the reference. What only one of the runs has is listed
and not compared. hf:config.json is the model of transformers that this file of Hugging Face
describes (docs/huggingface.md): it runs with the trace's weights and inputs, in float32.

exit code: 0 equivalent, 1 diverged, 2 could not compare
"""
_CACHE = "TTRACE_CACHE"
_TRACES = ("candidate", "reference")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    for name in ("A", "B"):
        help = "a command in quotes, the directory of a trace that was kept, or hf:config.json"
        parser.add_argument(name.lower(), metavar=name, help=help)
    command.add_directory(parser, "ttrace-diff")
    parser.add_argument(
        "--known",
        type=flags.path,
        metavar="FILE",
        help="a TOML list of known differences, with reasons, in addition to the package's own",
    )
    command.add_report(parser)
    parser.add_argument("--quiet", action="store_true", help="do not print progress")


def run(args: argparse.Namespace) -> int:
    """Record what is a command, and compare."""
    _require_known(args.known)
    os.environ.setdefault(_CACHE, str((args.directory / "references").resolve()))
    if api.is_model(args.a) and api.is_model(args.b):
        raise TTraceError("hf: describes a model: give a trace or a command with it")
    for other, folder in ((args.b, "a"), (args.a, "b")):
        _require_apart(other, args.directory / folder, "--directory")
    say = command.progress_of(args)
    first = _kept("A", args.a, Settings(directory=args.directory / "a"), say)
    second = _kept("B", args.b, Settings(directory=args.directory / "b"), say, like=first)
    settings = Settings(
        directory=args.directory,
        allow_unchecked=args.allow_unchecked,
        wandb=args.wandb,
        wandb_online=args.wandb,
    )
    return _shown(args, first, second, settings)


def against(args: argparse.Namespace, job: Command, say: command.Say) -> int:
    """Run ``ttrace check --against``: another run takes the place of the reference."""
    _require_known(args.known)
    settings, theirs = split(job.arguments, settings_of(args))
    home = settings.directory
    _require_apart(args.against, home, "--ttrace-dir")
    os.environ.setdefault(_CACHE, str((home / "references").resolve()))
    first = other_run(args.against, settings, home, say)
    say("this run")
    training.enter(job)
    # W&B gets the comparison with the other run, not the one with its own reference.
    job = _padded_like(first, dataclasses.replace(job, arguments=tuple(theirs)))
    nproc = args.nproc_per_node
    report = record.kept(job, settings.unlogged(home), say, fork=not args.no_fork, nproc=nproc)
    return _shown(args, first, report.directory, settings)


def other_run(run: str, settings: Settings, home: Path, say: command.Say) -> Path:
    """The trace of the run to compare with; of a command, as it is in the user's shell.

    ``settings`` are those of this run, below whose directory ``home`` it is recorded.
    """
    # What is traced, and how; what this run alone has is not the other's.
    alike = settings.unlogged(home / "against")
    alike = dataclasses.replace(alike, reference=None, small=None, bug=None)
    return _kept("the other run", run, alike, say)


def with_model(args: argparse.Namespace, job: Command, say: command.Say) -> Iterator[api.Report]:
    """Run ``ttrace check --against hf:config.json``: a check, then its reference against a model.

    A job in bf16, or with what transformers lacks or defines differently, runs once more without.
    """
    settings = split(job.arguments, settings_of(args))[0]
    how = {"fork": not args.no_fork, "nproc": args.nproc_per_node}
    checked = training.check(job, settings_of(args), say, **how, settle=not args.once)
    yield checked
    notice = ""
    if (plain := _plain(args.against, job, settings, checked)) is not None:
        job, alike, without = plain
        say(f"the same job without {without}, whose reference is compared with the model")
        notice = f"the reference is that of the same job without {without}"
        checked = training.check(job, alike, say, **how, settle=False)
    say(f"{args.against} with the weights and inputs of {checked.directory}")
    report = api.diff(
        args.against,
        checked.directory,
        output=settings.directory / "huggingface",
        known=args.known,
        allow_unchecked=settings.allow_unchecked,
        wandb=settings.wandb,
        wandb_online=settings.wandb_online,
    )
    if notice:
        notices = (notice, *report.summary.notices)
        report = api.rewritten(report, dataclasses.replace(report.summary, notices=notices))
    yield report


def _plain(
    model: str, job: Command, settings: Settings, checked: api.Report
) -> tuple[Command, Settings, str] | None:
    """A job without what no model of transformers is compared with, and what it is without.

    Differences between two models are smaller than rounding to bf16, for instance.
    """
    from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
    from megatron_ttrace.saved.huggingface import comparison

    alike = settings.unlogged(settings.directory / "float32")
    if imports_bridge(job.script):
        config = comparison.config_of(model)
        assert config is not None, "it is a model"
        without = ", ".join(comparison.avoided(config, checked.directory))
        return (job, dataclasses.replace(alike, plain=True), without) if without else None
    flags = CommandFlags.parse(split(job.arguments)[1]).flags
    left_out = [flag for flag in flags if flag.option in APART | NARROW]
    words = [w for flag in flags if flag not in left_out for w in flag.words()]
    without = " ".join(map(str, left_out))
    return (dataclasses.replace(job, arguments=tuple(words)), alike, without) if without else None


def _require_apart(trace: str, folder: Path, flag: str) -> None:
    """Refuse a trace that a run would overwrite. Raises ``TTraceError``."""
    if not os.path.isdir(trace):  # of a long command Path.is_dir raises an error
        return
    folder = folder.resolve()
    if Path(trace).resolve() in (folder, *(folder / name for name in _TRACES)):
        raise TTraceError(f"{trace} would be overwritten by the other run: choose another {flag}")


def _require_known(file: Path | None) -> None:
    """Read the user's list before the long work. Raises ``TTraceError``."""
    if file is not None:
        from megatron_ttrace.saved import known

        known.read(file)


def _kept(
    name: str, run: str, settings: Settings, say: command.Say, *, like: Path | None = None
) -> Path:
    """The directory of a trace; of a command, after recording it with these settings."""
    if os.path.isdir(run) or api.is_model(run):
        return Path(run)
    if len(run.split()) < 2 and not os.path.isfile(run):
        raise TTraceError(f"{run}: neither a directory nor a command")
    job = training.parsed([run], "record")
    if like is not None and not api.is_model(like):
        job = _padded_like(like, job)
    say(f"{name}: {in_one_line(run)}")
    record.run_apart(run, job, settings, quiet=say is command.silent)
    return settings.directory


def _padded_like(other: Path, job: Command) -> Command:
    """A command, with its vocabulary padded as in another run."""
    from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
    from megatron_ttrace.saved import difference

    multiple = difference.vocabulary_multiple(difference.open_side(other))
    padding = CommandFlags.parse(split(job.arguments)[1]).padding(multiple)
    return dataclasses.replace(job, arguments=(*job.arguments, *padding))


def _shown(args: argparse.Namespace, first: Path, second: Path, settings: Settings) -> int:
    """Compare two traces, into the directory of ``settings``, and show the report."""
    report = api.diff(
        first,
        second,
        output=settings.directory,
        known=args.known,
        allow_unchecked=settings.allow_unchecked,
        wandb=settings.wandb,
        wandb_online=settings.wandb_online,
        show=not args.json,
    )
    if reason := report.summary.reason:
        ends.write(ends.EndRecord(code=report.verdict.exit_code, at=0, message=reason))
    return command.answered(report, as_json=args.json)
