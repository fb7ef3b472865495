# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay checkpoints``: faults of saving and loading, and healthy restarts."""

import argparse
import dataclasses
import functools
import itertools
from pathlib import Path

from megatron_ttrace.cli import command
from tests.assay import harness
from tests.assay.checkpoints import answers
from tests.assay.checkpoints.answers import is_right
from tests.assay.checkpoints.jobs import Job, Planted, jobs, sample
from tests.assay.checkpoints.plain import Workshop
from tests.assay.harness import FALSE_ALARM, Row

BARS = {"found": 0.95, "right state": 0.95, "right side": 0.9}
_MOST_DRAWN = 10
_EPILOG = """\
examples:
  python -m tests.assay checkpoints run --count 20 --seed 7
  python -m tests.assay checkpoints healthy --only 'zero*'

run: a seed draws faults of saving and loading (tests/assay/planted), jobs and layouts. Runs without
the checker prove that each fault is real; the others are counted and left out. Then 'ttrace resume'
must find it, name the state that was changed, and say whether saving or loading did it. Faults of
loading are also given to 'ttrace check --load'.
healthy: 'ttrace resume' of all pairs in tests/assay/checkpoints/jobs.toml must be equivalent.

exit code: 0 the bars are met; 1 a healthy restart diverges; 2 else
"""


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``checkpoints`` command."""
    summary = "plant faults of saving and loading and count how many are found"
    parser = command.add(subparsers, "checkpoints", _run, summary=summary, epilog=_EPILOG)
    actions = parser.add_subparsers(required=True, metavar="run|healthy")
    harness.add(
        *(actions, "run", _run),
        summary="prove a sample of faults, and have the checker find them",
        epilog=_EPILOG,
        count=20,
        seed="required",
        directory="ttrace-out/checkpoints",
    )
    summary = "restart healthy jobs in other layouts"
    healthy = harness.add(
        *(actions, "healthy", _healthy),
        summary=summary,
        epilog=_EPILOG,
        directory="ttrace-out/checkpoints",
    )
    healthy.add_argument(
        "--check", action="store_true", help="'ttrace check --load' instead of 'ttrace resume'"
    )


def _run(args: argparse.Namespace) -> int:
    drawn = itertools.islice(sample(args.seed), args.count * _MOST_DRAWN)
    attempt = functools.partial(_attempt, Workshop(args.directory / "plain"), args.directory)

    def enough(rows: list[Row]) -> bool:
        return sum("found" in row.marks for row in rows) >= args.count

    cases = (case for case in drawn if not args.only or harness.matches(case.id, args.only))
    return harness.finish(harness.execute(cases, attempt, args, enough=enough), BARS)


def _attempt(workshop: Workshop, directory: Path, case: Planted) -> Row:
    """Prove that a fault is real, and have it found."""
    fault, job = case.fault, case.job
    proof = workshop.prove(case)
    details = {"layout": str(case.into), "truth": proof.truth, "trains": proof.trains}
    if not proof.is_real:
        column = "refused by Megatron" if proof.loud else "changes nothing"
        return Row(case.id, fault.side, {column: True}, proof.loud, details=details)
    folder = directory / case.id
    resumed = answers.resume(folder / "resume", job, [case.into], fault.order)
    marks, note = {"found": resumed.is_found}, f"resume: {resumed}"
    if resumed.is_found:
        first = resumed.named[0] if resumed.named else None
        marks["right state"] = first is not None and is_right(first, proof.truth)
        marks["right side"] = first is not None and first.side == fault.side
    details["resumed"] = dataclasses.asdict(resumed)
    if fault.side == "load":
        checked = answers.check(
            folder / "check", job, case.into, workshop.saved_in(job), fault.order
        )
        marks["found by check"] = checked.is_found
        if checked.is_found:
            right = bool(checked.named) and is_right(checked.named[0], proof.truth)
            marks["right by check"] = right
        note += f"; check: {checked}"
        details["checked"] = dataclasses.asdict(checked)
    return Row(case.id, fault.side, marks, note, details=details)


def _healthy(args: argparse.Namespace) -> int:
    table = jobs()
    cases = [table[name] for name in harness.chosen(table, args.only)]
    workshop = Workshop(args.directory / "plain")

    def attempt(job: Job) -> Row:
        folder = args.directory / job.id
        if args.check:
            place = workshop.saved_in(job)
            answered = [
                answers.check(folder / str(number), job, layout, place)
                for number, layout in enumerate(job.into)
            ]
        else:
            answered = [answers.resume(folder, job, job.into)]
        failed = (answer for answer in answered if answer.verdict != "equivalent")
        worst = next(failed, answered[0])
        marks = {"equivalent": worst.verdict == "equivalent"}
        if worst.is_found:
            marks[FALSE_ALARM] = True
        note = f"{len(job.into)} layouts: {worst}"
        return Row(job.id, "healthy", marks, note, details={"named": worst.named})

    rows = harness.execute(cases, attempt, args)
    pairs = sum(len(table[row.id].into) for row in rows)
    good = sum(len(table[row.id].into) for row in rows if row.marks["equivalent"])
    more = f"{pairs} pairs of layouts, {good} in jobs without any difference"
    return harness.finish(rows, {"equivalent": 1.0}, more=more)
