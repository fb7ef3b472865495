# SPDX-License-Identifier: Apache-2.0
"""``ttrace hunt``: check combinations of options, and reduce those that diverge."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING

from megatron_ttrace.cli import command, training
from megatron_ttrace.jobs import flags
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.jobs.settings import split
from megatron_ttrace.trace import owned, shared
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.sanitise import clean, in_one_line

if TYPE_CHECKING:
    from megatron_ttrace.evaluation.hunt.hunting import Hunt, Tried
    from megatron_ttrace.evaluation.hunt.reduction import Reduced

SUMMARY = "check combinations of options, or find those that a diverging job needs"
EPILOG = """\
examples:
  ttrace hunt --minutes 30
  ttrace hunt -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

The command is shrunk and checked. If it diverges, it is made as small as it can be while the same
module diverges: parallel axes are left out first, then single flags. If it is equivalent, other
values of its options are checked, until each pair of values that Megatron accepts was in a job.
What diverges is reduced in the same way; combinations with the same fault, or one in
docs/findings.md, are not checked. Results are kept below --directory: repeat the command to
continue, as long as Megatron's code is the same.

exit code: 0 all are equivalent, refused by Megatron, or fail without ttrace too; 1 a job diverged;
2 a job could not be checked
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--minutes",
        type=flags.number,
        default=10.0,
        metavar="MINUTES",
        help="begin no further combination after this time (default 10)",
    )
    parser.add_argument(
        "--seed",
        type=flags.integer(0),
        default=0,
        metavar="N",
        help="of the choice of combinations (default 0)",
    )
    command.add_seconds(parser)
    command.add_max_ranks(parser)
    command.add_directory(parser, "ttrace-out-hunt")
    parser.add_argument("--quiet", action="store_true", help="do not print progress")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    training.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Check the command, and then what is around it."""
    from megatron_ttrace.evaluation.hunt import combinations, page
    from megatron_ttrace.evaluation.hunt.hunting import Hunt
    from megatron_ttrace.evaluation.recipes.collect import Answer
    from megatron_ttrace.evaluation.recipes.run import Checker, Results, text
    from megatron_ttrace.jobs import validity
    from megatron_ttrace.jobs.shrink import plan

    say = command.progress_of(args)
    table = combinations.table()
    is_given = bool(args.command_words) or args.recipe is not None
    if is_given:
        base = training.command_of(args)
    else:
        base = Command(str(launch_dir() / "pretrain_gpt.py"), tuple(table.base.split()), ranks=1)
    settings, words = split(base.arguments)
    # A reference is that of one job, and a report of the user's is not to be overwritten.
    alike = dataclasses.replace(settings, reference=None, wandb=True, wandb_online=False)
    ours = alike.words()[2:]
    base = dataclasses.replace(base, arguments=tuple(words))
    script = scripts.require(base.script)
    shrunk = plan.shrink(base, args.max_ranks)
    directory = args.directory.absolute()
    with shared.alone(directory):
        checker = Checker(directory, script, args.seconds, text, ours)
        first = shrunk.jobs[0]
        small = dataclasses.replace(base, arguments=first.arguments, ranks=first.axes.ranks)
        space = combinations.Space(small if is_given else base, table.dimension)
        validity.prepare(script)
        results = Results(directory, ours)
        hunt = Hunt(space, checker, results, args.max_ranks, args.seed, fails=table.fails)
        row = hunt.given(base, shrunk.jobs)
        say(f"the shrunk command: {row.answer} {row.why[:120]}")
        if row.answer not in (Answer.EQUIVALENT, Answer.DIVERGED):
            raise TTraceError(f"the shrunk command: {row.answer}: {row.why}")
        tried: list[Tried] = []
        if row.answer is Answer.EQUIVALENT:
            for combination in hunt.run(60 * args.minutes):
                tried.append(combination)
                row = combination.row
                say(
                    f"[{len(tried)}] {row.key} {row.answer} {row.seconds:.0f} s {row.why[:100]}"
                    f"{' together: ' * bool(row.together)}{', '.join(v for _, v in row.together)}"
                )
        answer = _answer(hunt, tried)
        owned.write(directory / "hunt.json", [json.dumps(answer, indent=1)])
        owned.write(directory / "hunt.html", [page.render(space, tried, hunt.failures)])
    if args.json:
        print(json.dumps(answer))
    else:
        _show(hunt, tried)
        print(f"page       {command.near(directory / 'hunt.html')}")
    if hunt.failures or any(job.row.answer is Answer.DIVERGED for job in tried):
        return ExitCode.DIVERGED
    return ExitCode.COULD_NOT_CHECK if _unknown(tried) else ExitCode.EQUIVALENT


def _unknown(tried: list[Tried]) -> list[str]:
    """Why jobs that train without us could not be checked."""
    from megatron_ttrace.evaluation.recipes.collect import Answer

    rows = (job.row for job in tried)
    return [in_one_line(row.why) for row in rows if row.answer is Answer.COULD_NOT_CHECK]


def _answer(hunt: Hunt, tried: list[Tried]) -> dict[str, object]:
    return {
        "pairs": {"covered": len(hunt.covering.covered), "excluded": len(hunt.covering.excluded)},
        "combinations": [
            {"values": dict(job.combination), **dataclasses.asdict(job.row)} for job in tried
        ],
        "failures": [_failure(failure) for failure in hunt.failures],
    }


def _failure(reduced: Reduced) -> dict[str, object]:
    return {
        "job": reduced.first,
        "axes": reduced.axes,
        "flags": list(reduced.flags),
        "left out": list(reduced.left_out),
        "culprits": list(reduced.row.modules),
        "finding": reduced.row.finding,
        "checked": reduced.checked,
        "command": reduced.row.command,
        "healthy": reduced.healthy,
    }


def _show(hunt: Hunt, tried: list[Tried]) -> None:
    if tried:
        answers = Counter(job.row.answer for job in tried)
        counts = ", ".join(f"{number} {answer}" for answer, number in answers.most_common())
        print(f"ttrace: {len(tried)} combinations: {counts}")
        print(
            f"pairs      {len(hunt.covering.covered)} checked, {len(hunt.covering.excluded)} "
            "refused by Megatron, or known to fail or diverge"
        )
    for why, number in Counter(_unknown(tried)).most_common():
        print(f"unknown    {number}: {why}")
    for number, reduced in enumerate(hunt.failures, 1):
        sizes = ", ".join(f"{name} {size}" for name, size in reduced.axes.items()) or "no axis"
        print(f"\n{number}. the smallest job that diverges has {sizes} ({reduced.checked} checks)")
        print(f"culprit    {', '.join(map(clean, reduced.row.modules))}")
        print(f"needs      {', '.join(reduced.flags) or 'no other flag'}")
        print(f"finding    {reduced.row.finding or 'none is known'}")
        print(f"command    {reduced.row.command}")
        if reduced.healthy:
            print(f"healthy    {reduced.healthy}")
