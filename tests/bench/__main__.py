# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.bench``: what a check costs, as ratios within one run.

``make bench`` runs everything, in about an hour. A section is chosen with ``--only``, one of its
jobs with ``--job``: ``python -m tests.bench --only traced-step --job "benchmark job"`` takes a
minute or two.
"""

import argparse
import os
import platform
import sys

from tests.bench import baseline, table
from tests.bench.jobs import ROOT, BenchError
from tests.bench.sections import SECTIONS, Options, Row


def main(argv: list[str]) -> int:
    """Measure, print, and write the figures if asked to; 2 if a section failed."""
    args = _parser().parse_args(argv)
    rows: list[Row] = []
    failed = False
    for name in args.only or SECTIONS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            for row in SECTIONS[name](Options(args.pairs, args.job)):
                rows.append(row)
                print(table.line(row), flush=True)
        except BenchError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
    if args.write:
        table.write(ROOT / "docs" / "measurements.md", rows, machine(), args.pairs)
        baseline.update(rows, machine())
    return 2 if failed else 0


def machine() -> str:
    """What the figures depend on, in a line."""
    import torch

    return (
        f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.0f}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="sections")
    parser.add_argument("--job", default="", help="only jobs whose name contains this")
    parser.add_argument("--pairs", type=int, default=5, help="of each comparison (default 5)")
    parser.add_argument(
        "--write", action="store_true", help=f"write docs/measurements.md and {baseline.FILE}"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
