# SPDX-License-Identifier: Apache-2.0
"""``ttrace demo``: check a healthy run and a faulty one, on this machine, in about a minute."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from megatron_ttrace.errors import ExitCode
from megatron_ttrace.trace.records import Kind, Result, Summary

_EPILOG = """\
example:
  ttrace demo

Four ranks, TP 2 with sequence parallelism x PP 2, distributed optimizer, real text (the source of
this Python's standard library). The job is checked twice: unchanged, and with known bug 01.

exit code: 0 if the healthy run is equivalent and the bug is found, 1 if the healthy run diverged,
2 otherwise
"""
_RANKS = 4
_CORPUS_BYTES = 4_000_000
_ARGUMENTS = """
--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 128
--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 8 --train-iters 10
--lr 1e-3 --lr-warmup-iters 2 --eval-iters 0 --split 99,1,0 --hidden-dropout 0 --attention-dropout 0
--transformer-impl local --tensor-model-parallel-size 2 --sequence-parallel
--pipeline-model-parallel-size 2 --use-distributed-optimizer
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``demo`` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="check a healthy run and a run with a known bug",
        description="Check a healthy 4-rank job and the same job with a known bug.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("demo-out"), metavar="DIR", help="working directory"
    )
    parser.add_argument(
        "--script", type=Path, default=None, metavar="SCRIPT", help=argparse.SUPPRESS
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run both checks and say whether they came out as they must."""
    from rich.console import Console

    from megatron_ttrace.mcore import text_data
    from megatron_ttrace.mcore.versions import megatron_core_version
    from megatron_ttrace.report import files, terminal
    from megatron_ttrace.runtime.runner import Case, Runner

    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {line}", file=sys.stderr, flush=True)

    say("importing Megatron")
    runner = Runner(args.directory, flags=(), script=args.script)
    say("making a data set from this Python's standard library")
    prefix = text_data.standard_library_corpus(args.directory / "data" / "stdlib", _CORPUS_BYTES)
    words = f"{_ARGUMENTS} {text_data.training_flags(prefix, megatron_core_version())}".split()
    console = Console()
    outcomes: list[bool] = []
    alarm = False
    for title, flags, expected in (
        ("healthy: TP 2 + SP x PP 2, distributed optimizer", (), _is_healthy),
        (
            "faulty: the same job with known bug 01 (--ttrace-bug 01)",
            ("--ttrace-bug", "01"),
            _is_found,
        ),
    ):
        console.rule(title)
        name = title.split(":")[0]
        case = Case(name=name, arguments=tuple(words), nproc=_RANKS, flags=flags)
        checked = runner.run(case, say)
        summary, job = checked.summary, checked.job
        terminal.render(summary, checked.verdicts(), console, job.directory, job.isolating())
        outcomes.append(expected(summary))
        alarm = alarm or (expected is _is_healthy and summary.verdict is Result.DIVERGED)
    console.rule("demo")
    healthy, found = outcomes
    console.print(f"healthy run found equivalent: {'yes' if healthy else 'NO'}")
    console.print(f"bug 01 found at embedding.word_embeddings: {'yes' if found else 'NO'}")
    console.print(f"HTML report: {args.directory / 'faulty' / files.HTML}")
    say("done")
    if all(outcomes):
        return int(ExitCode.EQUIVALENT)
    return int(ExitCode.DIVERGED if alarm else ExitCode.COULD_NOT_CHECK)


def _is_healthy(summary: Summary) -> bool:
    return summary.verdict is Result.EQUIVALENT


def _is_found(summary: Summary) -> bool:
    return summary.verdict is Result.DIVERGED and any(
        culprit.name == "embedding.word_embeddings" and culprit.kind is Kind.OUTPUT
        for culprit in summary.culprits
    )
