# SPDX-License-Identifier: Apache-2.0
"""``ttrace eval nightly``: does the checker still find faults, and has Megatron regressed?"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ttrace.cli import command
from megatron_ttrace.errors import TTraceError

if TYPE_CHECKING:
    from megatron_ttrace.evaluation.nightly.run import Options

_EPILOG = """\
examples:
  ttrace eval nightly                          bugs, healthy matrix, planted errors, mutants
  ttrace eval nightly --quick                  about a minute, to see that it works
  ttrace eval nightly --minutes 60 --matrix '*/bf16' --mutants 40
  ttrace eval nightly --show                   draw the page again, without running anything

Files under DIR: history.sqlite (all nights), trend.html (the trend page), logs of the parts, wandb/
(the run of the night, if it is offline).

exit code: 0 all good, 1 a healthy job diverged, 2 no healthy job diverged, but a bug was missed or
something could not be run
"""


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``nightly`` command."""
    parser = command.add(
        subparsers,
        "nightly",
        run,
        summary="run all suites; report what changed since the last good night",
        description="Run known bugs, healthy jobs, planted errors and mutants; report changes.",
        epilog=_EPILOG,
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--quick", action="store_true", help="run two bugs and one healthy job only")
    what.add_argument("--no-bugs", action="store_true", help="omit the known bugs")
    what.add_argument("--no-matrix", action="store_true", help="omit the healthy configurations")
    what.add_argument("--no-planted", action="store_true", help="omit the planted errors")
    what.add_argument("--no-mutants", action="store_true", help="omit the mutants")
    what.add_argument(
        "--bug",
        action="append",
        default=[],
        dest="bugs",
        metavar="ID",
        help="run only this bug; can be repeated",
    )
    what.add_argument(
        "--bugs-flags",
        default="",
        metavar='"FLAGS"',
        help="flags for ttrace eval bugs run, e.g. '--bf16'",
    )
    what.add_argument(
        "--matrix",
        action="append",
        default=[],
        metavar="PATTERN",
        help="run only healthy jobs whose name matches, e.g. 'tp2*'; can be repeated",
    )
    what.add_argument("--mutants", type=int, metavar="N", help="size of the sample of mutants")
    what.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="time limit; parts that have not started by then do not run",
    )
    where = parser.add_argument_group("output")
    command.add_directory(where, "ttrace-out/nightly")
    where.add_argument(
        "--history", type=Path, metavar="FILE", help="SQLite file (default DIR/history.sqlite)"
    )
    where.add_argument(
        "--page", type=Path, metavar="FILE", help="trend page (default DIR/trend.html)"
    )
    where.add_argument(
        "--nights",
        type=int,
        default=30,
        metavar="N",
        help="number of nights on the page (default 30)",
    )
    where.add_argument(
        "--wandb", action="store_true", help="send the W&B run to the server (default: offline)"
    )
    where.add_argument("--no-wandb", action="store_true", help="make no W&B run")
    where.add_argument(
        "--show", action="store_true", help="draw the page again, without running anything"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the parts, store the results, draw the page and log."""
    from megatron_ttrace.evaluation.nightly import changes, trend
    from megatron_ttrace.evaluation.nightly import run as runner
    from megatron_ttrace.evaluation.nightly.history import History

    if args.nights < 1:
        raise TTraceError(f"--nights {args.nights}: at least 1 is needed")
    history_path = args.history or args.directory / "history.sqlite"
    page = args.page or args.directory / "trend.html"
    if args.show:
        if not history_path.is_file():
            raise TTraceError(f"{history_path}: no history yet; run ttrace eval nightly first")
        with History(history_path) as history:
            nights = history.last(args.nights)
        if not nights:
            raise TTraceError(f"{history_path}: no night in it yet")
        trend.write(page, nights)
        print(f"page: {page}")
        return nights[-1].exit_code
    options = _options(args)
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
        raise TTraceError(f"--directory {args.directory} is not writable ({reason})") from error
    # Opened before the long work: a history that cannot be written should not cost a night.
    with History(history_path) as history:
        good = history.last_good()
        night = runner.run(options, args.directory, command.progress())
        history.add(night)
        trend.write(page, history.last(args.nights))
    said = changes.lines(night, good)
    print("\n".join([changes.headline(night), *said]))
    print(f"page: {page}")
    if not args.no_wandb:
        from megatron_ttrace.evaluation.nightly import wandb

        print(wandb.log(night, said, page, directory=args.directory, online=args.wandb))
    return night.exit_code


def _options(args: argparse.Namespace) -> Options:
    from megatron_ttrace.evaluation.nightly.records import NightPart
    from megatron_ttrace.evaluation.nightly.run import QUICK_BUGS, QUICK_MATRIX, Options

    without = {
        NightPart.BUGS: args.no_bugs,
        NightPart.MATRIX: args.no_matrix,
        NightPart.PLANTED: args.no_planted or args.quick,
        NightPart.MUTANTS: args.no_mutants or args.quick,
    }
    parts = tuple(part for part, left_out in without.items() if not left_out)
    if not parts:
        raise TTraceError("nothing is left to run: omit one of the --no-... flags")
    if args.mutants is not None and args.mutants < 1:
        raise TTraceError(f"--mutants {args.mutants}: give at least 1, or --no-mutants")
    if args.minutes is not None and args.minutes <= 0:
        raise TTraceError(f"--minutes {args.minutes:g}: more than 0 is needed")
    return Options(
        parts=parts,
        bugs=tuple(args.bugs) or (QUICK_BUGS if args.quick else ()),
        bugs_flags=tuple(shlex.split(args.bugs_flags)),
        matrix=tuple(args.matrix) or (QUICK_MATRIX if args.quick else ()),
        mutants=args.mutants,
        seconds=None if args.minutes is None else 60 * args.minutes,
    )
