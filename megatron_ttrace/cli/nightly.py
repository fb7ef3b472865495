# SPDX-License-Identifier: Apache-2.0
"""``ttrace eval nightly``: are known bugs still found, and has Megatron regressed?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags
from megatron_ttrace.trace import shared
from megatron_ttrace.trace.errors import TTraceError

if TYPE_CHECKING:
    from megatron_ttrace.evaluation.nightly.run import Options

SUMMARY = "run all suites; report what changed since the last good night"
EPILOG = """\
examples:
  ttrace eval nightly --recipes Megatron-LM    known bugs, healthy matrix, recipes, combinations
  ttrace eval nightly --quick                  about a minute, to see that it works
  ttrace eval nightly --minutes 60 --matrix '*/bf16'

Files under DIR: nights.jsonl (all nights: one line for each bug, healthy job and recipe), logs of
the parts, wandb/ (the run of the night, if W&B was asked for and it is offline).

exit code: 0 all good, 1 a job diverged that should not, 2 none did, but a bug was missed or
something could not be run
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parts = parser.add_argument_group("what to run")
    parts.add_argument("--quick", action="store_true", help="run two bugs and one healthy job only")
    bugs, matrix = (parts.add_mutually_exclusive_group() for _ in range(2))
    bugs.add_argument("--no-bugs", action="store_true", help="omit the known bugs")
    matrix.add_argument("--no-matrix", action="store_true", help="omit the healthy configurations")
    bugs.add_argument(
        "--bug",
        action="append",
        default=[],
        dest="bugs",
        metavar="ID",
        help="run only this bug; can be repeated",
    )
    parts.add_argument(
        "--bugs-flags",
        type=flags.words,
        default=(),
        metavar='"FLAGS"',
        help="flags for ttrace eval bugs run, e.g. --bugs-flags='--bf16'",
    )
    matrix.add_argument(
        "--matrix",
        action="append",
        default=[],
        metavar="PATTERN",
        help="run only healthy jobs whose name matches, e.g. 'tp2*'; can be repeated",
    )
    parts.add_argument(
        "--recipes",
        type=Path,
        metavar="CHECKOUT",
        help="check the training configurations of this Megatron-LM checkout",
    )
    parts.add_argument(
        "--hunt",
        type=flags.number,
        default=30.0,
        metavar="MINUTES",
        help="check combinations of options for this time (default 30; 0 to omit them)",
    )
    parts.add_argument(
        "--minutes",
        type=flags.number,
        metavar="N",
        help="time limit; parts that have not started by then do not run",
    )
    output = parser.add_argument_group("output")
    command.add_directory(output, "ttrace-out/nightly")
    output.add_argument("--wandb", action="store_true", help="log the night to a new W&B run")


def run(args: argparse.Namespace) -> int:
    """Run the parts, store the results and log."""
    from megatron_ttrace.evaluation.nightly import history
    from megatron_ttrace.evaluation.nightly import run as runner

    options = _options(args)
    nights = args.directory / history.FILE
    with shared.alone(args.directory):
        history.prepare(nights)
        good = history.last_good(nights)
        night = runner.run(options, args.directory, command.progress())
        history.append(nights, night)
    lines = history.changes(night, good)
    print("\n".join([history.headline(night), *lines]))
    from megatron_ttrace.evaluation.nightly import wandb

    if where := wandb.log(night, lines, directory=args.directory, online=args.wandb):
        print(where)
    return night.exit_code


def _options(args: argparse.Namespace) -> Options:
    from megatron_ttrace.evaluation.bugs import catalogue
    from megatron_ttrace.evaluation.matrix.configurations import configurations, select
    from megatron_ttrace.evaluation.nightly.records import NightPart
    from megatron_ttrace.evaluation.nightly.run import QUICK_BUGS, QUICK_MATRIX, Options

    chosen = {
        NightPart.BUGS: not args.no_bugs,
        NightPart.MATRIX: not args.no_matrix,
        NightPart.RECIPES: args.recipes is not None,
        NightPart.HUNT: args.hunt > 0 and not args.quick,
    }
    parts = tuple(part for part, is_chosen in chosen.items() if is_chosen)
    if not parts:
        raise TTraceError("nothing is left to run: omit one of the --no-... flags")
    if args.recipes is not None and not args.recipes.is_dir():
        raise TTraceError(f"--recipes {args.recipes}: no such directory; give a checkout")
    if args.minutes is not None and args.minutes <= 0:
        raise TTraceError(f"--minutes {args.minutes:g}: more than 0 is needed")
    select(configurations(), args.matrix)
    for bug in args.bugs:
        catalogue.find(catalogue.load_catalogue(), bug)
    return Options(
        parts=parts,
        bugs=tuple(args.bugs) or (QUICK_BUGS if args.quick else ()),
        bugs_flags=args.bugs_flags,
        matrix=tuple(args.matrix) or (QUICK_MATRIX if args.quick else ()),
        recipes=args.recipes,
        hunt=args.hunt,
        seconds=None if args.minutes is None else 60 * args.minutes,
    )
