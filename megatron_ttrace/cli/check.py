# SPDX-License-Identifier: Apache-2.0
"""``ttrace check``: the whole check of a training job on one machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore import flags
from megatron_ttrace.processes import signals

_EPILOG = """\
example:
  ttrace check --nproc-per-node 2 -- launch/pretrain_gpt.py --tensor-model-parallel-size 2 \\
      --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \\
      --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 1 \\
      --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128

exit code: 0 equivalent, 1 diverged, 2 could not check, 130 interrupted by Ctrl-C
"""
_OWN = ("ttrace", "ttrace_exit", "ttrace_dir", "ttrace_role", "ttrace_overrides")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``check`` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check",
        help="check a training job against its single-device reference",
        description="Run a Megatron training script on this machine and check it; "
        "--ttrace and --ttrace-exit are implied.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        help="start every rank as a fresh process, also where forking would save time",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    flags.add_arguments(parser)
    parser.add_argument(
        "--timeout",
        dest="ttrace_timeout",
        type=flags.number,
        default=argparse.SUPPRESS,
        metavar="SECONDS",
        help="the same as --ttrace-timeout: how long a reference run may take, and how long ranks "
        f"may write nothing ({flags.DEFAULT_TIMEOUT:.0f})",
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
        "script", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS", help="what to run"
    )
    parser.set_defaults(run=run)
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
    ours, theirs = _split(args, script[1:])
    flags.settings_from_args(ours)
    with signals.abrupt():
        from megatron_ttrace.processes import job as jobs
        from megatron_ttrace.runtime import PRELOADED
        from megatron_ttrace.trace import shared

    shared.require_free(Path(ours.ttrace_dir))
    say = _silent if args.quiet or args.json else _progress()
    if not Path(script[0]).is_file():
        raise TTraceError(f"{script[0]}: no such script")
    fork = not args.no_fork and jobs.prepare(ours.ttrace_device, Path(script[0]), modules=PRELOADED)
    job = jobs.Job(
        script=Path(script[0]),
        arguments=tuple(theirs),
        nproc=args.nproc_per_node,
        directory=Path(ours.ttrace_dir),
        flags=tuple(_words(ours)),
    )
    summary = jobs.run(job, fork=fork, say=say)
    from megatron_ttrace.report import files, terminal

    if args.json:
        print(json.dumps(summary.to_json(), indent=1))
    else:
        from rich.console import Console

        _, verdicts = files.load_report(job.directory)
        terminal.render(summary, verdicts, Console(), job.directory, job.isolating())
    return int(summary.verdict.exit_code)


def _split(args: argparse.Namespace, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags may stand before the script or among its arguments; the latter win."""
    parser = flags.Parser(prog="ttrace check", add_help=False, allow_abbrev=False)
    flags.add_arguments(parser)
    before = argparse.Namespace(
        **{name: value for name, value in vars(args).items() if name.startswith("ttrace")}
    )
    return parser.parse_known_args(words, before)


def _words(ours: argparse.Namespace) -> list[str]:
    """Our flags as words again, without those that ``check`` sets itself, and without defaults."""
    defaults = vars(flags.add_arguments(argparse.ArgumentParser()).parse_args([]))
    words = []
    for name, value in vars(ours).items():
        flag = "--" + name.replace("_", "-")
        if name in _OWN or value is None or value is False or value == defaults.get(name):
            continue
        # One word, so that a value that starts with dashes is not taken for a flag.
        words += [flag] if value is True else [f"{flag}={value}"]
    return words


def _silent(line: str) -> None:
    del line


def _progress() -> Any:
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {line}", file=sys.stderr, flush=True)

    return say
