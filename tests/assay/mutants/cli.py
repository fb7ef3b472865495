# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay mutants``: inject single faults into Megatron's parallel code."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.cli import command
from megatron_ttrace.trace.errors import ExitCode, TTraceError

if TYPE_CHECKING:
    from tests.assay.mutants.records import Mutant, MutantRow

_EPILOG = """\
examples:
  python -m tests.assay mutants list --only '*wrong-group*'
  python -m tests.assay mutants run --json mutants.json
  python -m tests.assay mutants run --only 'tensor_parallel.*' --all

Places for faults are found by scanning Megatron's source. One fault at a time is put in, in memory,
in the ranks of a small job on the CPU, and the job is checked. The checker does not know of it. A
mutant counts if some job runs its line. It is killed if the check says 'diverged', or if the job
crashes or hangs. For those that the check finds, the first culprit and its cause are compared with
what was changed (docs/mutants.md).

exit code: 0 at least 95 % killed of those that neither crash nor hang; 1 a job diverged without a
mutant, or with one that is listed as equivalent; 2 fewer were killed, or a job could not run
"""
_STANDARD_OUTPUT = Path("-")
_COUNT = 100


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``mutants`` command."""
    parser = command.add(
        subparsers,
        "mutants",
        _run,
        summary="inject single faults into Megatron's parallel code and count how many are found",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(required=True, metavar="list|run|score")
    listing = command.add(
        actions,
        "list",
        _list,
        summary="list the mutants",
        epilog="example:\n  python -m tests.assay mutants list --only '*off-by-one*'",
    )
    running = command.add(
        actions,
        "run",
        _run,
        summary="run a sample of the mutants, or all",
        epilog=_EPILOG,
    )
    scoring = command.add(
        actions,
        "score",
        _score,
        summary="score the rows of python -m tests.assay mutants run --all",
        epilog="example:\n"
        "  python -m tests.assay mutants score ttrace-out/mutants/rows.jsonl --seed 2 --seed 3",
    )
    scoring.add_argument("rows", type=Path, metavar="ROWS", help="rows.jsonl of the run")
    for action in (listing, running):
        action.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="PATTERN",
            help="only ids that match, e.g. 'distributed.*:lost-mark:*'; can be repeated",
        )
    for action in (listing, running, scoring):
        action.add_argument(
            "--json",
            type=Path,
            nargs="?",
            const=_STANDARD_OUTPUT,
            metavar="FILE",
            help="write JSON to FILE, or print it instead of a table",
        )
    for action in (running, scoring):
        action.add_argument(
            "--count",
            type=int,
            default=_COUNT,
            metavar="N",
            help=f"size of a sample (default {_COUNT})",
        )
    running.add_argument(
        "--all",
        action="store_true",
        help="run all mutants whose line some job runs; rows are kept in DIR/rows.jsonl, and "
        "those that it already has are not run again",
    )
    for action, what in (
        (running, "seed of a sample (default: today's date, UTC)"),
        (scoring, "score the sample of this seed"),
    ):
        action.add_argument(
            "--seed",
            type=int,
            action="append",
            default=[],
            metavar="N",
            help=f"{what}; can be repeated",
        )
    for action in (listing, running):
        action.add_argument(
            "--checkout",
            type=Path,
            metavar="DIR",
            help="use the megatron package and the training scripts of this Megatron-LM checkout",
        )
    running.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="NAME",
        help="run only in this job, e.g. tp2-sp; can be repeated",
    )
    command.add_directory(running, "ttrace-out/mutants")
    return parser


def _found(args: argparse.Namespace) -> list[Mutant]:
    """The mutants that ``--only`` selects."""
    from tests.assay.mutants.scan import scan

    if args.checkout is not None:
        if not (args.checkout / "megatron" / "core" / "__init__.py").is_file():
            raise TTraceError(f"--checkout {args.checkout}: has no megatron/core")
        _use(args.checkout.resolve())
    if args.json != _STANDARD_OUTPUT:
        command.require_writable("--json", args.json)
    mutants = scan(args.only)
    if not mutants:
        raise TTraceError(f"no mutant matches {' '.join(args.only)}: see the command 'list'")
    return mutants


def _use(checkout: Path) -> None:
    """Import Megatron from there: here, and in the ranks of candidates and references."""
    others = [path for path in [os.environ.get("PYTHONPATH")] if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(checkout), *others])
    sys.path.insert(0, str(checkout))


def _list(args: argparse.Namespace) -> int:
    mutants = _found(args)
    if args.json is not None:
        _write(args.json, [mutant.to_json() for mutant in mutants])
        return ExitCode.EQUIVALENT
    for mutant in mutants:
        print(f"{mutant.id}  line {mutant.span.first_line}: {_change(mutant)}")
    print(f"{len(mutants)} mutants")
    return ExitCode.EQUIVALENT


def _run(args: argparse.Namespace) -> int:
    from megatron_ttrace.evaluation import suites
    from megatron_ttrace.mcore.versions import megatron_core_version
    from tests.assay.mutants import store
    from tests.assay.mutants.campaign import Campaign
    from tests.assay.mutants.layouts import named_layouts
    from tests.assay.mutants.scan import sample

    _require_count(args)
    named = named_layouts(args.layout)
    mutants = _found(args)
    file = args.directory / "rows.jsonl"
    rows = store.start(file, store.identity(named)) if args.all else []
    seeds = args.seed or ([] if args.all else [_today()])
    began = time.monotonic()
    say = command.progress()
    campaign = Campaign(args.directory, named, say, args.checkout)
    layouts = {mutant.id: campaign.layouts_of(mutant) for mutant in mutants}
    reached = [mutant for mutant in mutants if layouts[mutant.id]]
    samples = [mutant for seed in seeds for mutant in sample(reached, args.count, seed)]
    chosen = reached if args.all else list(dict.fromkeys(samples))
    if not chosen:
        raise TTraceError("no layout runs the line of any of these mutants")
    say(f"{len(reached)} of {len(mutants)} are reached, {len(chosen)} to run")
    say(f"seeds: {' '.join(map(str, seeds)) or 'none'}")
    ids = {mutant.id for mutant in chosen}
    rows = [row for row in rows if row.mutant.id in ids]
    done = {row.mutant.id for row in rows}
    if done:
        say(f"{len(done)} are in {file}")
    plan = [(mutant, layouts[mutant.id]) for mutant in chosen if mutant.id not in done]
    for row in campaign.run(plan):
        rows.append(row)
        if args.all:
            store.append(file, row)
        last = row.trials[-1]
        say(f"{len(rows)}/{len(chosen)} {row.fate} {last.layout} {row.mutant.id} {last.told[:120]}")
    report = {
        "megatron_core": megatron_core_version(),
        "chosen": len(mutants),
        "reached": len(reached),
        **_scored(rows, seeds, args.count),
        "unhealthy": campaign.unhealthy,
        "seconds": round(time.monotonic() - began, 1),
    }
    report["passed"] = report["passed"] and not campaign.unhealthy
    _tell(args.json, rows, report)
    alarm = campaign.alarmed or any(row.disproved for row in rows)
    return suites.exit_code(alarm=alarm, met=bool(report["passed"]))


def _score(args: argparse.Namespace) -> int:
    from megatron_ttrace.evaluation import suites
    from tests.assay.mutants import store

    _require_count(args)
    rows = store.load(args.rows)
    report = _scored(rows, args.seed, args.count)
    _tell(args.json, rows, report)
    alarm = any(row.disproved for row in rows)
    return suites.exit_code(alarm=alarm, met=bool(report["passed"]))


def _require_count(args: argparse.Namespace) -> None:
    if args.count < 1:
        raise TTraceError(f"--count {args.count}: at least 1 mutant is needed")


def _today() -> int:
    """The date as a number; a sample that is always the same would be learned by heart."""
    return int(f"{datetime.datetime.now(datetime.UTC):%Y%m%d}")


def _scored(rows: Sequence[MutantRow], seeds: Sequence[int], count: int) -> dict[str, Any]:
    """The scores of all rows, and of the sample that each seed chooses from them."""
    from tests.assay.mutants import score
    from tests.assay.mutants.scan import sample

    by_id = {row.mutant.id: row for row in rows}
    mutants = [row.mutant for row in rows]
    samples = {
        seed: [by_id[mutant.id] for mutant in sample(mutants, count, seed)] for seed in seeds
    }
    return {
        "run": len(rows),
        **score.score(rows).to_json(),
        "seeds": {str(seed): score.score(one).to_json() for seed, one in samples.items()},
        "bars": score.BARS,
        "passed": score.passes(rows),
        "mutants": [score.to_json(row) for row in rows],
    }


def _tell(file: Path | None, rows: Sequence[MutantRow], report: dict[str, Any]) -> None:
    if file is not None:
        _write(file, report)
    if file != _STANDARD_OUTPUT:
        _show(rows, report)


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

    from tests.assay.mutants import score

    short = {"equivalent": "equiv.", "file_first": "file", "function_first": "func."}
    short |= {"file_in_three": "file/3", "function_in_three": "func./3"}
    headers = (short.get(column, column) for column in score.COLUMNS)
    table = Table("operator", *headers, box=None, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for operator in sorted({row.mutant.operator for row in rows}):
        own = score.score(row for row in rows if row.mutant.operator == operator)
        table.add_row(operator, *map(str, dataclasses.astuple(own)))
    total = dataclasses.astuple(score.score(rows))
    table.add_row("all", *map(str, total), style="bold")
    console = Console()
    console.print(table)
    for row in rows:
        told = f"{row.mutant.id}  {_change(row.mutant)}"
        if row.disproved:
            console.print(f"[red]listed as equivalent, but found:[/red] {escape(row.mutant.id)}")
        elif row.column == "survived":
            console.print(f"survived: {escape(f'{told}: {row.why or "NOT EXPLAINED"}')}")
        elif score.right_cause(row) is False:
            console.print(f"wrong cause: {escape(f'{told}: {row.trials[-1].explained}')}")
    if "chosen" in report:
        console.print(
            f"{report['reached']} of {report['chosen']} reached by some job, "
            f"{report['run']} run in {report['seconds']:.0f} s"
        )
    for seed, one in report["seeds"].items():
        console.print(f"seed {seed}: {_words(one)}")
    if len(report["seeds"]) != 1:
        console.print(_words(report))


def _words(scored: dict[str, Any]) -> str:
    return (
        f"killed {scored['score']:.1%}, of the silent ones {scored['silent_score']:.1%}; of those "
        f"found: right module {scored['right_module']:.1%}, cause told {scored['cause_told']:.1%}, "
        f"of these true {scored['cause_true']:.1%}; look at: first place in the right file "
        f"{scored['file_first_share']:.1%}, function {scored['function_first_share']:.1%}, "
        f"within three {scored['file_in_three_share']:.1%}, "
        f"{scored['function_in_three_share']:.1%}"
    )


def _change(mutant: Mutant) -> str:
    before, after = (" ".join(text.split()) for text in (mutant.fragment, mutant.replacement))
    return f"{before}  ->  {after}"
