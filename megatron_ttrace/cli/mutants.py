# SPDX-License-Identifier: Apache-2.0
"""``ttrace eval mutants``: inject single faults into Megatron's parallel code."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.cli import command
from megatron_ttrace.errors import ExitCode, TTraceError

if TYPE_CHECKING:
    from megatron_ttrace.evaluation.mutants.records import Mutant, MutantRow

_EPILOG = """\
examples:
  ttrace eval mutants list --only '*wrong-group*'
  ttrace eval mutants run --json mutants.json
  ttrace eval mutants run --only 'tensor_parallel.*' --all

Places for faults are found by scanning Megatron's source. One fault at a time is put in, in memory,
in the ranks of a small job on the CPU, and the job is checked. The checker does not know of it. A
mutant counts if some job runs its line. It is killed if the check says 'diverged', or if the job
crashes or hangs.

exit code: 0 at least 95 % killed; 1 a job diverged without a mutant, or with one that is listed as
harmless; 2 fewer were killed, or a job could not run
"""
_STANDARD_OUTPUT = Path("-")
_COUNT = 100
_SEED = 1


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``mutants`` command."""
    parser = command.add(
        subparsers,
        "mutants",
        _run,
        summary="inject single faults into Megatron's parallel code and count how many are found",
        description="Inject single faults (mutants) into Megatron's parallel code.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(required=True, metavar="list|run")
    listing = command.add(
        actions,
        "list",
        _list,
        summary="list the mutants",
        description="List the mutants of the installed Megatron.",
        epilog="example:\n  ttrace eval mutants list --only '*off-by-one*'",
    )
    running = command.add(
        actions,
        "run",
        _run,
        summary="run a sample of the mutants, or all",
        description="Run mutants and report how many are found.",
        epilog=_EPILOG,
    )
    for action in (listing, running):
        action.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="PATTERN",
            help="only ids that match, e.g. 'distributed.*:lost-mark:*'; can be repeated",
        )
        action.add_argument(
            "--json",
            type=Path,
            nargs="?",
            const=_STANDARD_OUTPUT,
            metavar="FILE",
            help="write JSON to FILE, or print it instead of a table",
        )
    running.add_argument(
        "--all", action="store_true", help="run all mutants whose line some job runs"
    )
    running.add_argument(
        "--count",
        type=int,
        default=_COUNT,
        metavar="N",
        help=f"size of the sample (default {_COUNT})",
    )
    running.add_argument("--seed", type=int, default=_SEED, metavar="N", help="seed of the sample")
    running.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="NAME",
        help="run only in this job, e.g. tp2-sp; can be repeated",
    )
    command.add_directory(running, "ttrace-out/mutants")
    return parser


def _found(args: argparse.Namespace) -> tuple[int, list[Mutant]]:
    """The number of mutants that scanning found, and those that ``--only`` selects."""
    from megatron_ttrace.evaluation.mutants.scan import scan

    found = scan()
    chosen = [
        mutant
        for mutant in found
        if not args.only or any(fnmatch.fnmatchcase(mutant.id, one) for one in args.only)
    ]
    if not chosen:
        raise TTraceError(f"no mutant matches {' '.join(args.only)}: see ttrace eval mutants list")
    if args.json != _STANDARD_OUTPUT:
        command.require_writable("--json", args.json)
    return len(found), chosen


def _list(args: argparse.Namespace) -> int:
    _, mutants = _found(args)
    if args.json is not None:
        _write(args.json, [mutant.to_json() for mutant in mutants])
        return ExitCode.EQUIVALENT
    for mutant in mutants:
        print(f"{mutant.id}  line {mutant.span.first_line}: {_change(mutant)}")
    print(f"{len(mutants)} mutants")
    return ExitCode.EQUIVALENT


def _run(args: argparse.Namespace) -> int:
    from megatron_ttrace.evaluation import suites
    from megatron_ttrace.evaluation.mutants import score
    from megatron_ttrace.evaluation.mutants.campaign import Campaign
    from megatron_ttrace.evaluation.mutants.layouts import named_layouts
    from megatron_ttrace.evaluation.mutants.scan import sample
    from megatron_ttrace.mcore.versions import megatron_core_version

    if args.count < 1:
        raise TTraceError(f"--count {args.count}: at least 1 mutant is needed")
    scanned, mutants = _found(args)
    named = named_layouts(args.layout)
    began = time.monotonic()
    say = command.progress()
    campaign = Campaign(args.directory, named, say)
    layouts = {mutant.id: campaign.layouts_of(mutant) for mutant in mutants}
    reached = [mutant for mutant in mutants if layouts[mutant.id]]
    chosen = reached if args.all else sample(reached, args.count, args.seed)
    if not chosen:
        raise TTraceError("no layout runs the line of any of these mutants")
    say(f"{scanned} found, {len(reached)} of {len(mutants)} are reached, {len(chosen)} to run")
    rows: list[MutantRow] = []
    for row in campaign.run([(mutant, layouts[mutant.id]) for mutant in chosen]):
        rows.append(row)
        last = row.trials[-1]
        say(f"{len(rows)}/{len(chosen)} {row.fate} {last.layout} {row.mutant.id} {last.told[:120]}")
    total = score.score(rows)
    report = {
        "megatron_core": megatron_core_version(),
        "scanned": scanned,
        "chosen": len(mutants),
        "reached": len(reached),
        "run": len(rows),
        **total.to_json(),
        "bar": score.BAR,
        "unhealthy": campaign.unhealthy,
        "passed": score.passes(rows) and not campaign.unhealthy,
        "seconds": round(time.monotonic() - began, 1),
        "mutants": [row.to_json() for row in rows],
    }
    if args.json is not None:
        _write(args.json, report)
    if args.json != _STANDARD_OUTPUT:
        _show(rows, report)
    alarm = campaign.alarmed or any(row.disproved for row in rows)
    return suites.exit_code(alarm=alarm, met=bool(report["passed"]))


def _write(file: Path, content: Any) -> None:
    text = json.dumps(content, indent=1) + "\n"
    if file == _STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")


def _show(rows: Sequence[MutantRow], report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from megatron_ttrace.evaluation.mutants.score import COLUMNS

    table = Table("operator", *COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    counts = Counter((row.mutant.operator, row.column) for row in rows)
    for operator in sorted({row.mutant.operator for row in rows}):
        table.add_row(operator, *(str(counts[operator, column]) for column in COLUMNS))
    totals = (sum(row.column == column for row in rows) for column in COLUMNS)
    table.add_row("all", *map(str, totals), style="bold")
    console = Console()
    console.print(table)
    for row in rows:
        if row.disproved:
            console.print(f"[red]listed as harmless, but found:[/red] {escape(row.mutant.id)}")
        elif row.column == "survived":
            why = row.why or "NOT EXPLAINED"
            console.print(f"survived: {escape(f'{row.mutant.id}  {_change(row.mutant)}: {why}')}")
    console.print(
        f"{report['scanned']} found by scanning, {report['reached']} of {report['chosen']} reached "
        f"by some job, {report['run']} run in {report['seconds']:.0f} s; killed "
        f"{report['score']:.1%}, of the silent ones {report['silent_score']:.1%}"
    )


def _change(mutant: Mutant) -> str:
    before, after = (" ".join(text.split()) for text in (mutant.fragment, mutant.replacement))
    return f"{before}  ->  {after}"
