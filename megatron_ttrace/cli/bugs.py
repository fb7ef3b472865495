# SPDX-License-Identifier: Apache-2.0
"""``ttrace eval bugs``: the known bugs, and whether the checker finds them."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.cli import command
from megatron_ttrace.evaluation.bugs import catalogue
from megatron_ttrace.evaluation.bugs.catalogue import Bug
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import ExitCode, TTraceError, reported
from megatron_ttrace.trace.sanitise import in_one_line

if TYPE_CHECKING:
    from megatron_ttrace.evaluation.bugs.suite import BugRow

SUMMARY = "list known bugs, or test that the checker finds them"
EPILOG = """\
examples:
  ttrace eval bugs list
  ttrace eval bugs run 01 11
  ttrace eval bugs run --all --model llama --bf16

Every bug is re-created in Megatron's own code, in memory, in a small job on the CPU. The job is
checked without the bug (it must be equivalent) and with it (it must diverge at the expected
place). The checker does not know that there is a bug.

exit code: 0 all as expected, 1 a job without a bug diverged, 2 a bug was missed or not explained as
expected, or a case could not be run
"""
_MODELS = ("gpt", "llama")
_SIZES = ("small", "medium")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    actions = parser.add_subparsers(required=True, metavar="list|run")
    listing = command.add(
        actions,
        "list",
        _list,
        summary="list the known bugs",
        epilog="example:\n  ttrace eval bugs list --json",
    )
    running = command.add(
        actions,
        "run",
        run,
        summary="run known bugs and report which are found",
        epilog=EPILOG,
    )
    for action in (listing, running):
        action.add_argument("--json", action="store_true", help="print JSON instead of a table")
    running.add_argument("id", nargs="*", metavar="ID", help="bugs to run, e.g. 01 04a")
    running.add_argument("--all", action="store_true", help="run all bugs")
    running.add_argument("--model", choices=_MODELS, default="gpt", help="small model to use")
    running.add_argument("--size", choices=_SIZES, default="small", help="size of the model")
    running.add_argument("--bf16", action="store_true", help="train in bf16 instead of fp32")
    running.add_argument("--seed", type=int, default=None, metavar="N", help="Megatron's --seed")
    running.add_argument(
        "--isolate",
        action="store_true",
        help="check with --ttrace-isolate: only the culprit may fail",
    )
    running.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="also write each finished case to FILE, one JSON object per line",
    )
    command.add_directory(running, "ttrace-out/bugs")


def _list(args: argparse.Namespace) -> int:
    bugs = catalogue.load_catalogue()
    if args.json:
        print(json.dumps([_described(bug) for bug in bugs], indent=1))
        return ExitCode.EQUIVALENT
    for bug in bugs:
        about = f"{bug.name} ({bug.axis}): {bug.title}"
        culprit = f"culprit {bug.expected.module} {bug.expected.kind}"
        text = f"{bug.id:<4} {about}; {culprit}; upstream: {', '.join(bug.upstream)}"
        print(textwrap.fill(text, 80, subsequent_indent=" " * 5))
    return ExitCode.EQUIVALENT


def _described(bug: Bug) -> dict[str, Any]:
    return {
        "id": bug.id,
        "name": bug.name,
        "title": bug.title,
        "upstream": list(bug.upstream),
        "confidence": bug.confidence,
        "axis": bug.axis,
        "layouts": [
            {"nproc": layout.nproc, "arguments": list(layout.arguments)} for layout in bug.layouts
        ],
        "expected": {
            "module": bug.expected.module,
            "kind": bug.expected.kind.value,
            "direction": bug.expected.direction.value,
        },
    }


def run(args: argparse.Namespace) -> int:
    """Run the chosen bugs, and show which are found."""
    from megatron_ttrace.evaluation.bugs import suite

    bugs = catalogue.load_catalogue()
    if args.all == bool(args.id):
        raise TTraceError("name the bugs ('ttrace eval bugs list' shows them) or give --all")
    chosen = bugs if args.all else [catalogue.find(bugs, wanted) for wanted in args.id]
    for bug in () if args.all else chosen:
        if not any(args.model in layout.models for layout in bug.layouts):
            raise TTraceError(f"bug {bug.id} has no layout for --model {args.model}")
    with reported(f"--rows {args.rows} is not writable", OSError):
        output = owned.open_named(args.rows) if args.rows else nullcontext()
    began = time.monotonic()
    flags = ("--ttrace-isolate",) if args.isolate else ()
    variant = suite.Variant(args.model, args.size, args.bf16, args.seed, flags)
    rows = []
    with output as file:
        for row in suite.run(chosen, variant, args.directory, command.progress()):
            rows.append(row)
            if file is not None:
                print(json.dumps(row.to_json()), file=file, flush=True)
    if args.json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        _show(rows, time.monotonic() - began)
    return suite.exit_code(rows)


def _show(rows: Sequence[BugRow], seconds: float) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from megatron_ttrace.evaluation.bugs import suite

    table = Table("bug", "ranks", "layout", "healthy", "detected", "localised", "explained")
    table.columns[0].no_wrap = True
    table.add_column("margin", justify="right")
    table.add_column("seconds", justify="right")
    for row in rows:
        answer = row.assessment
        table.add_row(
            f"{row.bug.id} {row.bug.name}",
            str(row.layout.nproc),
            escape(row.layout.short),
            _word(row.is_healthy if row.healthy else None),
            _word(answer.detected if answer else None),
            _word(answer.localised if answer else None),
            _word(answer.explained if answer else None),
            "" if not answer or answer.margin is None else f"{answer.margin:.3g}",
            f"{row.seconds:.1f}",
        )
    console = Console()
    if not console.is_terminal:
        # A pipe or a log has no width limit.
        console = Console(width=max(console.width, 140))
    console.print(table)
    for row in rows:
        if row.problem:
            problem = escape(in_one_line(row.problem))
            console.print(f"[red]{row.bug.id} {row.bug.name}:[/red] {problem}")
    good = sum(row.met for row in rows)
    console.print(f"{good} of {len(rows)} cases as expected, in {seconds:.0f} s")
    console.print(suite.totals(rows), soft_wrap=True)
    console.print(_looked(rows), soft_wrap=True)


def _looked(rows: Sequence[BugRow]) -> str:
    """How often the report names the changed code as the place to look at."""
    places = [place for row in rows if (place := row.looked) is not None]
    first, three = (
        f"{sum(getattr(place, f'file_{where}') for place in places)} in the right file, "
        f"{sum(getattr(place, f'function_{where}') for place in places)} in the right function"
        for where in ("first", "in_three")
    )
    return f"look at, {len(places)} cases: first place {first}; one of three places {three}"


def _word(value: bool | None) -> str:
    return "–" if value is None else "[green]yes[/green]" if value else "[red]NO[/red]"
