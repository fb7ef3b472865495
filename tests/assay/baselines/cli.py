# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay baselines``: other tools' rules on the same tensors."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags, inputs
from megatron_ttrace.jobs.settings import check_single
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.sanitise import in_one_line

if TYPE_CHECKING:
    from tests.assay.baselines.run import Collected
    from tests.assay.baselines.tally import RuleRow

_EPILOG = """\
example:
  python -m tests.assay baselines 01 03 --bf16
  python -m tests.assay baselines --all --healthy 'tp2*/fp32' 'pp2*/fp32'
  python -m tests.assay baselines --planted ttrace-out/reference ttrace-out/candidate

The job of each known bug runs with and without the bug, and all tensors are saved. Then every rule
judges the same merged tensors. A rule finds a bug if it flags a tensor that it does not flag
without the bug. It locates the bug if one of these is the tensor in which the bug starts.

exit code: 0, or 2 if a case could not be run
"""


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``baselines`` command."""
    parser = command.add(
        subparsers,
        "baselines",
        run,
        summary="apply other tools' rules to the known bugs and to healthy runs",
        description="Count misses and false alarms of other tools' rules on the same tensors.",
        epilog=_EPILOG,
    )
    parser.add_argument("id", nargs="*", metavar="ID", help="known bugs, e.g. 01 04a")
    parser.add_argument("--all", action="store_true", help="all known bugs")
    parser.add_argument(
        "--healthy",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="healthy configurations of 'ttrace eval matrix' to add, e.g. 'tp2*/bf16'",
    )
    parser.add_argument(
        "--planted",
        nargs=2,
        type=Path,
        metavar=("REFERENCE_DIR", "CANDIDATE_DIR"),
        help="plant errors in a saved run instead, as 'python -m tests.assay plant' does",
    )
    help = "number of planted errors of each kind (default 500)"
    parser.add_argument("--trials", type=flags.integer(1), default=500, metavar="N", help=help)
    parser.add_argument("--bf16", action="store_true", help="train in bf16 instead of fp32")
    command.add_directory(parser, "ttrace-out/baselines")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run, apply, count."""
    if args.planted:
        return _plant(args)
    from megatron_ttrace.evaluation.bugs import catalogue, suite
    from megatron_ttrace.evaluation.matrix.configurations import configurations, select
    from tests.assay.baselines import run as running
    from tests.assay.baselines.tally import rule_rows

    known = catalogue.load_catalogue()
    chosen = known if args.all else [catalogue.find(known, wanted) for wanted in args.id]
    everything = [one for one in configurations() if not one.finding]
    healthy = select(everything, args.healthy) if args.healthy else []
    if not chosen and not healthy:
        raise TTraceError("name known bugs, or give --all, or --healthy PATTERN")
    say = command.progress()
    found = running.Collected()
    directory = args.directory / ("bf16" if args.bf16 else "fp32")
    if chosen:
        running.bugs(chosen, suite.Variant(bf16=args.bf16), directory, say, found)
    if healthy:
        running.matrix(healthy, directory / "matrix", say, found)
    table = rule_rows(found.cases, found.healthy)
    if args.json:
        print(json.dumps(_described(found, table), indent=1))
    else:
        _show(found, table)
    return ExitCode.COULD_NOT_CHECK if found.problems else ExitCode.EQUIVALENT


def _plant(args: argparse.Namespace) -> int:
    from tests.assay.baselines.planted import columns
    from tests.assay.planting import Field

    check_single(args, "trials")
    for folder in args.planted:
        inputs.require_regular_folder(folder)
    found = columns(Field(*args.planted), args.trials)
    if args.json:
        print(json.dumps([dataclasses.asdict(column) for column in found], indent=1))
        return ExitCode.EQUIVALENT
    print(f"| rule | {' | '.join(column.sort for column in found)} |")
    print("|---" * (len(found) + 1) + "|")
    for rule in found[0].found:
        print(f"| {rule} | {' | '.join(f'{column.found[rule]:.0%}' for column in found)} |")
    return ExitCode.EQUIVALENT


def _described(found: Collected, table: list[RuleRow]) -> dict[str, Any]:
    return {
        "cases": [case.name for case in found.cases],
        "healthy": list(found.healthy),
        "compared": found.compared,
        "rules": [dataclasses.asdict(row) for row in table],
        "problems": found.problems,
    }


def _show(found: Collected, table: list[RuleRow]) -> None:
    print(
        f"{len(found.cases)} cases of known bugs; {len(found.healthy)} healthy runs, "
        f"{found.compared:,} tensors"
    )
    print()
    print("| rule | bugs missed | culprit not flagged | healthy runs with an alarm | tensors |")
    print("|---|---|---|---|---|")
    for row in table:
        print(
            f"| {row.rule} | {_some(row.missed)} | {_some(row.unlocated)} "
            f"| {len(row.alarmed)} | {row.false_tensors:,} |"
        )
    for problem in found.problems:
        print(f"could not be run: {in_one_line(problem)}", file=sys.stderr)


def _some(names: tuple[str, ...]) -> str:
    """``3: 01 03 04a``, each bug once."""
    ids = dict.fromkeys(name.partition("/")[0] for name in names)
    return f"{len(names)}: {' '.join(ids)}" if names else "0"
