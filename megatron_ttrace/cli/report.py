# SPDX-License-Identifier: Apache-2.0
"""``ttrace report DIR``: show a finished check again, from its files."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from megatron_ttrace.jobs import flags
from megatron_ttrace.saved import api
from megatron_ttrace.trace.records import Summary, Verdict

SUMMARY = "show the report of a finished check again"
EPILOG = """\
example:
  ttrace report ttrace-out
  ttrace report ttrace-out --html /tmp/report.html --junit /tmp/junit.xml
  ttrace report ttrace-out --json | jq '.culprits[0]'

exit code: 0 equivalent, 1 diverged, 2 could not check (or the files cannot be read)
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "directory", type=flags.path, metavar="DIR", help="the --ttrace-dir of the check"
    )
    parser.add_argument(
        "--html", type=flags.path, metavar="PATH", help="write the HTML page to PATH"
    )
    parser.add_argument("--junit", type=flags.path, metavar="PATH", help="write JUnit XML to PATH")
    parser.add_argument("--wandb", action="store_true", help="log the report to a new W&B run")
    parser.add_argument(
        "--json", action="store_true", help="print the summary and the failing rows as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Render what was asked for and return the exit code of the check.

    Raises ``TTraceError`` when files are missing, cut off or foreign, or an output is unwritable.
    """
    from rich.console import Console

    from megatron_ttrace.report import html, junit, terminal, wandb
    from megatron_ttrace.trace import files

    report = api.load_report(args.directory)
    summary, verdicts = report.summary, report.verdicts
    for path, sink in ((args.html, html), (args.junit, junit)):
        if path is not None:
            page = sink.render(summary, verdicts, files.run_of(args.directory))
            files.write_named(path, page)
    if args.json:
        print(json.dumps(_machine(summary, verdicts), indent=2, allow_nan=False))
    else:
        terminal.render(summary, verdicts, Console(), args.directory)
    if args.wandb:
        page, directory = args.directory / files.HTML, args.directory
        if where := wandb.log(summary, verdicts, page, directory=directory, online=True):
            print(where, file=sys.stderr if args.json else sys.stdout)
    return int(summary.verdict.exit_code)


def _machine(summary: Summary, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """``summary.json`` with one row per layer and direction, worst first."""
    from megatron_ttrace.report import table

    rows = [
        {
            "layer": row.layer,
            "direction": row.direction.value,
            "tensors": row.group.total,
            "failures": row.group.failures,
            "unchecked": row.group.unchecked,
            "worst": row.group.worst.to_json(),
        }
        for row in table.layer_rows(verdicts)
    ]
    return {**summary.to_json(), "layers": rows}
