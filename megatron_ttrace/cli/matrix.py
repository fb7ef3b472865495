# SPDX-License-Identifier: Apache-2.0
"""``ttrace eval matrix``: check healthy configurations; every one must come out equivalent."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_ttrace.cli import command
from megatron_ttrace.evaluation.matrix.configurations import configurations, select
from megatron_ttrace.jobs import flags
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.records import Result

if TYPE_CHECKING:
    from megatron_ttrace.evaluation.matrix.suite import MatrixRow

SUMMARY = "check healthy configurations, which must all pass"
EPILOG = """\
example:
  ttrace eval matrix --list
  ttrace eval matrix 'tp2*' '*/llama/bf16'
  ttrace eval matrix --all --seeds 1234,7,42

Configurations that show a fault of Megatron listed in docs/findings.md must diverge.

exit code: 0 all as expected, 1 a healthy one diverged, 2 no healthy one diverged, but one could not
be checked or a listed fault was not found
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="names to run, e.g. 'tp2*'")
    parser.add_argument("--all", action="store_true", help="run all configurations")
    parser.add_argument("--list", action="store_true", help="list the names and exit")
    parser.add_argument(
        "--seeds",
        "--seed",
        type=_seeds,
        default=(1234,),
        metavar="N[,N...]",
        help="Megatron's --seed (default 1234); each configuration runs once per seed",
    )
    command.add_directory(parser, "ttrace-out-matrix")
    parser.add_argument(
        "--ttrace-flags",
        type=flags.words,
        default=(),
        metavar='"FLAGS"',
        help="additional --ttrace-* flags for every check, e.g. --ttrace-flags='--ttrace-isolate'",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(word) for word in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers from 0, e.g. 4,16,64")
    return seeds


def run(args: argparse.Namespace) -> int:
    """Check the chosen configurations."""
    everything = configurations()
    if args.list:
        print("\n".join(configuration.name for configuration in everything))
        return ExitCode.EQUIVALENT
    if args.all == bool(args.patterns):
        raise TTraceError(
            "give name patterns ('ttrace eval matrix --list' shows the names) or --all"
        )
    chosen = select(everything, args.patterns)
    from megatron_ttrace.evaluation.matrix import suite
    from megatron_ttrace.saved.runner import NO_WANDB, Runner

    runner = Runner(args.directory, flags=(NO_WANDB, *args.ttrace_flags))
    began = time.monotonic()
    rows: list[MatrixRow] = []
    for row in suite.check(chosen, args.seeds, runner):
        rows.append(row)
        if args.json:
            print(json.dumps(codec.encode(row)), flush=True)
        else:
            print(f"[{len(rows)}/{len(chosen) * len(args.seeds)}] {_line(row)}", flush=True)
    if not args.json:
        _total(rows, time.monotonic() - began)
    return suite.exit_code(rows)


def _line(row: MatrixRow) -> str:
    note = f"worst {row.worst_margin:.3g}x {row.worst}" if row.tensors else row.why
    if row.inexact:
        note += f", {row.inexact} of {row.exact} not bitwise"
    if row.tensors and row.why:
        note = row.why
    if row.finding:
        outdated = "no longer found: " if row.verdict is Result.EQUIVALENT else ""
        note = f"{outdated}docs/findings.md, {row.finding}; {note}"
    return (
        f"{row.name:<34} {row.verdict.value:<12} {row.tensors:>5} tensors "
        f"{row.unchecked:>3} unchecked {row.seconds:5.1f} s  {note}"
    )


def _total(rows: Sequence[MatrixRow], seconds: float) -> None:
    healthy = [row for row in rows if not row.finding]
    good = sum(row.verdict is Result.EQUIVALENT for row in healthy)
    faults = len(rows) - len(healthy)
    tensors = sum(row.tensors for row in rows)
    unchecked = sum(row.unchecked for row in rows)
    worst = max(healthy or rows, key=lambda row: row.worst_margin)
    print(
        f"{good} of {len(healthy)} equivalent"
        + (f", and {faults} known faults of Megatron" if faults else "")
        + f"; {tensors} tensors, {unchecked} unchecked "
        f"({unchecked / max(tensors, 1):.2%}); worst healthy margin {worst.worst_margin:.3g} "
        f"({worst.name}: {worst.worst}); {sum(row.inexact for row in rows)} of "
        f"{sum(row.exact for row in rows)} that must be bitwise equal are not; "
        f"{seconds:.0f} s"
    )
