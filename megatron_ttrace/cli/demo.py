# SPDX-License-Identifier: Apache-2.0
"""``ttrace demo``: check a healthy run and a faulty one, on this machine, in about a minute."""

import argparse

from megatron_ttrace.cli import command
from megatron_ttrace.trace.errors import ExitCode
from megatron_ttrace.trace.records import Kind, Result, Summary

SUMMARY = "check a healthy run and a run with a known bug"
EPILOG = """\
example:
  ttrace demo

Four ranks, TP 2 with sequence parallelism x PP 2, distributed optimizer, real text (the source of
this Python's standard library). The job is checked twice: unchanged, and with known bug 01.

exit code: 0 if the healthy run is equivalent and the bug is found, 1 if the healthy run diverged,
2 otherwise
"""
_RANKS = 4
_ARGUMENTS = """
--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 128
--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 8 --train-iters 10
--lr 1e-3 --lr-warmup-iters 2 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0
--transformer-impl local --tensor-model-parallel-size 2 --sequence-parallel
--pipeline-model-parallel-size 2 --use-distributed-optimizer
"""
_NEXT = "ttrace check --shrink -- torchrun --nproc-per-node 2"
_OWN = """
--tensor-model-parallel-size 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4
--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4
--train-iters 1 --lr 1e-3 --transformer-impl local --mock-data --tokenizer-type NullTokenizer
--vocab-size 128
"""
"""A job that needs no data."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    command.add_directory(parser, "demo-out")


def run(args: argparse.Namespace) -> int:
    """Run both checks and say whether they came out as they must."""
    from rich.console import Console

    from megatron_ttrace.jobs.shrink import documents
    from megatron_ttrace.report import terminal
    from megatron_ttrace.saved.runner import Case, Runner
    from megatron_ttrace.trace import files

    say = command.progress()

    say("importing Megatron")
    runner = Runner(args.directory, flags=())
    say("making a data set from this Python's standard library")
    prefix = documents.write(args.directory / "data" / "stdlib")
    words = (*_ARGUMENTS.split(), *documents.arguments(str(runner.script), prefix))
    console = Console()

    def check(name: str, title: str, *flags: str) -> Summary:
        console.rule(f"{name}: {title}")
        checked = runner.run(Case(name=name, arguments=words, nproc=_RANKS, flags=flags), say)
        summary, job = checked.summary, checked.job
        again = command.typed(job.isolating())
        terminal.render(summary, checked.verdicts(), console, job.directory, again)
        return summary

    healthy = check("healthy", "TP 2 + SP x PP 2, distributed optimizer").verdict
    faulty = check(
        "faulty", "the same job with known bug 01 (--ttrace-bug 01)", "--ttrace-bug", "01"
    )
    is_found = faulty.verdict is Result.DIVERGED and any(
        culprit.name == "embedding.word_embeddings" and culprit.kind is Kind.OUTPUT
        for culprit in faulty.culprits
    )
    console.rule("demo")
    equivalent = healthy is Result.EQUIVALENT
    console.print(f"healthy run found equivalent: {'yes' if equivalent else 'NO'}")
    console.print(f"bug 01 found at embedding.word_embeddings: {'yes' if is_found else 'NO'}")
    console.print(f"HTML report: {args.directory / 'faulty' / files.HTML}")
    console.rule("next: check a job of your own")
    console.print("Put the command of your job behind the last --. As it stands, this runs:")
    example = [*_NEXT.split(), str(command.near(runner.script)), *_OWN.split()]
    for line in terminal.shell_lines(command.typed(example), terminal.PIPED_WIDTH - 2):
        terminal.say(console, f"  {line}")
    say("done")
    if equivalent and is_found:
        return ExitCode.EQUIVALENT
    return ExitCode.DIVERGED if healthy is Result.DIVERGED else ExitCode.COULD_NOT_CHECK
