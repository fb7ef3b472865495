# SPDX-License-Identifier: Apache-2.0
"""``ttrace nightly``: does the checker still see, and has Megatron slipped back?"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.errors import TTraceError

if TYPE_CHECKING:
    from megatron_ttrace.evaluation.nightly.run import Options

_EPILOG = """\
examples:
  ttrace nightly                          everything: known bugs, healthy matrix, mutants
  ttrace nightly --quick                  a minute, to see that it runs
  ttrace nightly --minutes 60 --matrix '*/bf16' --mutants 40
  ttrace nightly --show                   the page again, without running anything

Files under DIR: history.sqlite (all nights), trend.html (yesterday beside today), logs of the
parts, wandb/ (the night's run, when it is offline).

exit code: 0 all good, 1 a healthy job diverged, 2 nothing of that, but a bug was missed or
something could not be run
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``nightly`` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "nightly",
        help="known bugs, healthy matrix and mutants; what changed since the last good night",
        description="Run everything that a night should, keep it, and say what changed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is run")
    what.add_argument("--quick", action="store_true", help="two bugs and one healthy job")
    what.add_argument("--no-bugs", action="store_true", help="without the known bugs")
    what.add_argument("--no-matrix", action="store_true", help="without the healthy matrix")
    what.add_argument("--no-mutants", action="store_true", help="without the mutants")
    what.add_argument(
        "--bug",
        action="append",
        default=[],
        dest="bugs",
        metavar="ID",
        help="this bug only; can be repeated",
    )
    what.add_argument(
        "--bugs-flags", default="", metavar='"FLAGS"', help="for ttrace bugs run, e.g. '--bf16'"
    )
    what.add_argument(
        "--matrix",
        action="append",
        default=[],
        metavar="PATTERN",
        help="healthy jobs whose name fits, e.g. 'tp2*'; can be repeated",
    )
    what.add_argument("--mutants", type=int, metavar="N", help="size of the sample of mutants")
    what.add_argument(
        "--minutes", type=float, metavar="N", help="stop then; what is left is not run"
    )
    where = parser.add_argument_group("where it goes")
    where.add_argument(
        "--directory",
        type=Path,
        default=Path("ttrace-out/nightly"),
        metavar="DIR",
        help="where to work, and where results are kept",
    )
    where.add_argument(
        "--history", type=Path, metavar="FILE", help="SQLite file (DIR/history.sqlite)"
    )
    where.add_argument("--page", type=Path, metavar="FILE", help="trend page (DIR/trend.html)")
    where.add_argument("--nights", type=int, default=30, metavar="N", help="on the page (30)")
    where.add_argument("--no-wandb", action="store_true", help="do not log to W&B")
    where.add_argument("--show", action="store_true", help="run nothing, make the page again")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the parts, keep the night, draw the page, log, and answer."""
    from megatron_ttrace.evaluation.nightly import changes, trend
    from megatron_ttrace.evaluation.nightly import run as runner
    from megatron_ttrace.evaluation.nightly.history import History

    if args.nights < 1:
        raise TTraceError(f"--nights {args.nights}: at least 1 is needed")
    history_path = args.history or args.directory / "history.sqlite"
    page = args.page or args.directory / "trend.html"
    if args.show:
        if not history_path.is_file():
            raise TTraceError(f"{history_path}: no history yet; ttrace nightly makes it")
        with History(history_path) as history:
            nights = history.last(args.nights)
        if not nights:
            raise TTraceError(f"{history_path}: no night in it yet")
        trend.write(page, nights)
        print(f"page: {page}")
        return int(nights[-1].exit_code)
    options = _options(args)
    _writable(args.directory)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr, flush=True)

    # Before the night: a history that cannot be kept should not cost one.
    with History(history_path) as history:
        good = history.last_good()
        night = runner.run(options, args.directory, say)
        history.add(night)
        trend.write(page, history.last(args.nights))
    said = changes.lines(night, good)
    print("\n".join([changes.headline(night), *said]))
    print(f"page: {page}")
    if not args.no_wandb:
        from megatron_ttrace.evaluation.nightly import wandb

        print(wandb.log(night, said, page, directory=args.directory))
    return int(night.exit_code)


def _options(args: argparse.Namespace) -> Options:
    from megatron_ttrace.evaluation.nightly.records import Part
    from megatron_ttrace.evaluation.nightly.run import QUICK_BUGS, QUICK_MATRIX, Options

    without = {
        Part.BUGS: args.no_bugs,
        Part.MATRIX: args.no_matrix,
        Part.MUTANTS: args.no_mutants or args.quick,
    }
    parts = tuple(part for part, left_out in without.items() if not left_out)
    if not parts:
        raise TTraceError("nothing is left to run: leave out one of the --no-... flags")
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


def _writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
        raise TTraceError(f"--directory {directory} is not writable ({reason})") from error
