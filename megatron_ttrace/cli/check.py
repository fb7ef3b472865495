# SPDX-License-Identifier: Apache-2.0
"""``ttrace check``: the whole check of a training job on one machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_ttrace.cli import command
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore import flags
from megatron_ttrace.runtime import api

_EPILOG = """\
example:
  ttrace check --nproc-per-node 2 -- launch/pretrain_gpt.py --tensor-model-parallel-size 2 \\
      --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \\
      --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 1 \\
      --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128

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
        default=1,
        metavar="N",
        help="number of ranks (default 1)",
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
        "script",
        nargs=argparse.REMAINDER,
        metavar="-- SCRIPT ARGS",
        help="script and its arguments",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the check and show its report."""
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        raise TTraceError("no script given: ttrace check --nproc-per-node N -- SCRIPT ARGS")
    try:
        flags.path(script[0])
    except argparse.ArgumentTypeError as error:
        raise TTraceError(f"the script {error}") from error
    flags.check_single(args, "nproc_per_node")
    report = api.run_check(
        Path(script[0]),
        script[1:],
        before(args),
        nproc=args.nproc_per_node,
        environment={},
        fork=not args.no_fork,
        say=command.silent if args.quiet or args.json else command.progress(),
    )
    if args.json:
        print(json.dumps(report.summary.to_json(), indent=1))
    else:
        from rich.console import Console

        from megatron_ttrace.report import terminal

        terminal.render(
            report.summary, report.verdicts, Console(), report.directory, report.isolating
        )
    return int(report.verdict.exit_code)


def before(args: argparse.Namespace) -> argparse.Namespace:
    """Our flags that stand before the script; those among its arguments win."""
    return argparse.Namespace(
        **{name: value for name, value in vars(args).items() if name.startswith("ttrace")}
    )
