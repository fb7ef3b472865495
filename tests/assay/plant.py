# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay plant``: plant errors in a saved run and count how many are found."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags, inputs
from megatron_ttrace.jobs.settings import check_single
from megatron_ttrace.saved import api
from megatron_ttrace.trace.errors import ExitCode, TTraceError

SIZES = (0.5, 0.9, 1.1, 2.0, 5.0)
FOUND = 0.99
"""Share of errors of two tolerances and more that must be found."""
MOST_TRIALS = 1_000_000
FLAGGED = 0.01
"""Share of errors of half a tolerance that may be flagged."""

_EPILOG = """\
examples:
  ttrace check --nproc-per-node 2 --ttrace-save-candidate -- launch/pretrain_gpt.py ...
  python -m tests.assay plant ttrace-out/reference ttrace-out/candidate
  python -m tests.assay plant --job tp2-sp/gpt/fp32 --job dp2-zero/llama/bf16

One error at a time is put into a random box of a random tensor on a random rank, and judged as in
every check. Sizes are in tolerances. In the last rows the shape of the error determines its size.

exit code: 0 if at least 99 % of the errors of 2 tolerances and more are found, and at most 1 % of
those of half a tolerance are flagged; 2 if not, or if no tensor is suitable
"""


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``plant`` command."""
    parser = command.add(
        subparsers,
        "plant",
        run,
        summary="plant errors in a saved run and count how many are found",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "saved",
        nargs="*",
        type=flags.path,
        metavar="REFERENCE_DIR CANDIDATE_DIR",
        help="a run that was checked with --ttrace-save-candidate",
    )
    parser.add_argument(
        "--job",
        action="append",
        default=[],
        metavar="PATTERN",
        help="check these configurations of 'ttrace eval matrix' and plant there; can be repeated",
    )
    command.add_directory(parser, "ttrace-out/plant")
    parser.add_argument(
        "--trials",
        type=flags.integer(1, MOST_TRIALS),
        default=500,
        metavar="N",
        help="number of errors of each kind (default 500)",
    )
    parser.add_argument(
        "--seed",
        type=flags.integer(least=0),
        default=1,
        help="seed of the random places (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    return parser


def run(args: argparse.Namespace) -> int:
    """Plant, judge, count."""
    check_single(args, "trials", "seed")
    if len(args.saved) != (0 if args.job else 2):
        raise TTraceError("give REFERENCE_DIR and CANDIDATE_DIR of a saved run, or --job PATTERN")
    for folder in args.saved:
        inputs.require_regular_folder(folder)
    runs = {"": args.saved} if args.saved else _checked(args.job, args.directory)
    rows = [row for job, (one, other) in runs.items() for row in _plant(job, one, other, args)]
    # No run diverged: it is the checker that finds too little, or too much.
    return ExitCode.EQUIVALENT if all(row["met"] for row in rows) else ExitCode.COULD_NOT_CHECK


def _checked(patterns: list[str], directory: Path) -> dict[str, list[Path]]:
    """Check healthy configurations; returns by name where reference and candidate were saved."""
    from megatron_ttrace.evaluation.matrix.configurations import configurations, select
    from megatron_ttrace.saved.runner import NO_WANDB, Runner

    runner = Runner(directory, flags=(NO_WANDB, "--ttrace-save-candidate"), shares=False)
    found = {}
    for one in select([one for one in configurations() if not one.finding], patterns):
        folder = runner.run(one.case(directory)).job.directory
        found[one.name] = [folder / "reference", folder / "candidate"]
    return found


def _plant(job: str, one: Path, other: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    from tests.assay.planting import Field, sweep

    with api.consistent(one, other):
        field = Field(one, other)
        planted = sweep(field, SIZES, args.trials, args.seed)
    rows = []
    for (shape, size), trials in planted.items():
        row: dict[str, Any] = {
            **({"job": job} if job else {}),
            "shape": shape,
            "size": None if math.isnan(size) else size,
            "trials": len(trials),
            "found": sum(trial.found for trial in trials) / len(trials),
            "right_rank": sum(trial.right_rank for trial in trials) / len(trials),
        }
        row["met"] = _is_kept(row)
        rows.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
    if not args.json:
        _show(rows, len(field), job)
    return rows


def _is_kept(row: dict[str, Any]) -> bool:
    size = row["size"]
    if size is None:
        return True
    if size >= 2.0:
        return bool(row["found"] >= FOUND)
    return size > 0.5 or bool(row["found"] <= FLAGGED)


def _show(rows: list[dict[str, Any]], places: int, job: str) -> None:
    where = f"{job}: {places}" if job else f"{places}"
    print(f"{where} places (a tensor on a rank); {rows[0]['trials']} errors of each kind")
    print(f"{'shape':<10} {'tolerances':>10} {'found':>8} {'right rank':>10}")
    for row in rows:
        size = "its own" if row["size"] is None else f"{row['size']:g}"
        print(f"{row['shape']:<10} {size:>10} {row['found']:>8.1%} {row['right_rank']:>10.1%}")
