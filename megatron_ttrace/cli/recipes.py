# SPDX-License-Identifier: Apache-2.0
"""``ttrace recipes``: check all training configurations of a Megatron-LM checkout, shrunk.

Or those of an installed Megatron-Bridge.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags
from megatron_ttrace.trace import owned, shared
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.sanitise import in_one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_ttrace.evaluation.recipes.collect import Recipe
    from megatron_ttrace.evaluation.recipes.run import JobRow, RecipeRow

SUMMARY = "check all training configurations of a Megatron-LM checkout or folder, shrunk"
EPILOG = """\
examples:
  ttrace recipes Megatron-LM --dry-run
  ttrace recipes Megatron-LM --only 'moe/*' --limit 20
  ttrace recipes my-scripts
  ttrace recipes --bridge --only 'llama/*pretrain*'

The functional tests' model_config.yaml and the examples that train GPT, or in any other folder the
scripts that start a pretrain_*.py, are shrunk; equal jobs are checked once. Finished jobs are kept
under --directory: repeat the command to continue, as long as the code is the same. The table is
also written there, as recipes.json. With --bridge the recipes are those of the installed
megatron-bridge, whose models get the sizes that transformers' classes have by themselves.

exit code: 0 all that ran are equivalent or refused by Megatron; 1 a job diverged, even if a known
finding explains it, because it may have a second fault; 2 a job could not be checked, or fails
without ttrace too, or there is none
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("checkout", type=flags.path, metavar="CHECKOUT", nargs="?")
    parser.add_argument(
        "--bridge", action="store_true", help="the recipes of the installed megatron-bridge"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="configurations to run, e.g. 'moe/*'; may be repeated",
    )
    parser.add_argument(
        "--limit", type=flags.integer(1), metavar="N", help="check at most N jobs now"
    )
    command.add_max_ranks(parser)
    command.add_seconds(parser)
    parser.add_argument("--dry-run", action="store_true", help="shrink only, run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_directory(parser, "ttrace-out-recipes")


def run(args: argparse.Namespace) -> int:
    """Check the configurations and print the table."""
    from megatron_ttrace.evaluation.recipes.bridge import discover
    from megatron_ttrace.evaluation.recipes.run import Checker, Results, coverage, jobs_of, text
    from megatron_ttrace.jobs import validity

    say = command.silent if args.json else command.progress()
    recipes = _collect(args)
    for pattern in args.only:
        if not any(fnmatch.fnmatchcase(recipe.name, pattern) for recipe in recipes):
            raise TTraceError(f"no configuration matches {pattern}: see --dry-run")
    jobs = jobs_of(recipes)
    directory = args.directory.absolute()
    say(f"{len(recipes)} configurations, {len(jobs)} different jobs")
    finished: dict[str, JobRow] = {}
    if jobs and not args.dry_run:
        with shared.alone(directory):
            first = Path(next(iter(jobs.values())).script)
            data = discover.data if args.bridge else text
            checker = Checker(directory, first, args.seconds, data)
            validity.prepare(first)
            results = Results(directory)
            rows_of = {key: results.of(job) for key, job in jobs.items()}
            finished = {key: row for key, row in rows_of.items() if row}
            remaining = [job for key, job in jobs.items() if key not in finished][: args.limit]
            rows_now = checker.runner.each(lambda job: results.keep(job, checker(job)), remaining)
            for number, row in enumerate(rows_now, 1):
                finished[row.key] = row
                place = f"[{number}/{len(remaining)}] {row.key}"
                say(f"{place} {row.answer} {row.seconds:.0f} s {row.why[:120]}")
    rows = coverage(recipes, finished)
    table = {
        "checkout": "megatron-bridge" if args.bridge else str(args.checkout),
        "jobs": {key: dataclasses.asdict(finished[key]) for key in jobs if key in finished},
        "recipes": [dataclasses.asdict(row) for row in rows],
    }
    if not args.dry_run:
        owned.make(directory, ignored=True)
        owned.write(directory / "recipes.json", [json.dumps(table, indent=1)])
    if args.json:
        print(json.dumps(table))
    else:
        _show(rows, [finished[key] for key in jobs if key in finished])
    if not jobs and not args.dry_run:
        raise TTraceError("no configuration makes a job, so nothing was checked")
    return _exit_code(rows)


def _exit_code(rows: Sequence[RecipeRow]) -> ExitCode:
    from megatron_ttrace.evaluation.recipes.collect import Answer
    from megatron_ttrace.evaluation.recipes.run import BAD

    answers = {row.answer for row in rows}
    if Answer.DIVERGED in answers:
        return ExitCode.DIVERGED
    return ExitCode.EQUIVALENT if answers.isdisjoint(BAD) else ExitCode.COULD_NOT_CHECK


def _collect(args: argparse.Namespace) -> list[Recipe]:
    from megatron_ttrace.evaluation.recipes import collect
    from megatron_ttrace.evaluation.recipes.bridge import discover

    if args.bridge == (args.checkout is not None):
        raise TTraceError("give either a checkout of Megatron-LM or --bridge")
    if args.bridge:
        return discover.collect(args.only, args.max_ranks)
    if not args.checkout.is_dir():
        raise TTraceError(f"{args.checkout}: no such directory; give a checkout of Megatron-LM")
    return collect.collect(args.checkout.absolute(), args.only, args.max_ranks, anywhere=True)


def _show(rows: Sequence[RecipeRow], jobs: Sequence[JobRow]) -> None:
    """The table: counts first, then everything that is not equivalent, with its reason."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from megatron_ttrace.evaluation.recipes.collect import Answer

    console = Console()
    counts = Counter(_label(row) for row in rows)
    training = [row for row in rows if row.answer not in (None, Answer.REFUSED, Answer.HUB)]
    good = sum(row.answer is Answer.EQUIVALENT for row in training)
    table = Table("configurations", "result", box=None, pad_edge=False)
    for label, count in counts.most_common():
        table.add_row(str(count), label)
    console.print(table)
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.answer not in (None, Answer.EQUIVALENT):
            reasons.setdefault((_label(row), in_one_line(row.why)), []).append(row.name)
    if reasons:
        table = Table("n", "result", "why", "for instance", box=None, pad_edge=False)
        for (label, why), names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            table.add_row(*map(Text, (str(len(names)), label, why, names[0])))
        console.print(table)
    if training and jobs:
        console.print(
            f"{good} of {len(training)} are equivalent, not counting what Megatron refuses or "
            f"a model hub is needed for "
            f"({good / len(training):.1%})",
            highlight=False,
        )
    if jobs:
        worst = max(jobs, key=lambda job: job.unchecked / max(1, job.tensors))
        console.print(
            f"{len(jobs)} jobs, {sum(job.tensors for job in jobs)} tensors, most unchecked "
            f"{worst.unchecked / max(1, worst.tensors):.1%} ({worst.key}), "
            f"{sum(job.seconds for job in jobs):.0f} s",
            highlight=False,
        )


def _label(row: RecipeRow) -> str:
    from megatron_ttrace.evaluation.recipes.collect import Answer

    if row.answer is None:
        return "not run yet" if row.jobs else "not for training"
    if row.answer is Answer.DIVERGED:
        return f"diverged (finding: {row.finding})" if row.finding else "diverged (new)"
    return row.answer.value
