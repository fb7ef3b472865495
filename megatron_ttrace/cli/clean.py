# SPDX-License-Identifier: Apache-2.0
"""``ttrace clean``: remove what checks have left."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from megatron_ttrace.jobs import flags
from megatron_ttrace.trace.errors import ExitCode, TTraceError

_DAY = 86400.0
SUMMARY = "list and remove what checks have left: reports, traces, references"
EPILOG = """\
example:
  ttrace clean                           list what is in ttrace-out, with sizes
  ttrace clean ttrace-out --yes          remove it
  ttrace clean --cache --older-than 30   list old references that runs share (TTRACE_CACHE)

Nothing is removed without --yes. Only directories that a check has made are searched, and only
files of a check are removed. Links are not followed. What a running check uses is kept.

exit code: 0, or 2 if something could not be removed
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "directories",
        nargs="*",
        type=flags.path,
        metavar="DIR",
        help="directories to search, with all below them (default ttrace-out)",
    )
    parser.add_argument("--cache", action="store_true", help="search TTRACE_CACHE")
    parser.add_argument(
        "--older-than",
        type=flags.number,
        default=0.0,
        metavar="DAYS",
        help="only what was last written more than DAYS ago",
    )
    parser.add_argument("--yes", action="store_true", help="remove what is listed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """List, and remove if confirmed. Raises ``TTraceError`` when a directory does not exist."""
    # Only here: the store imports torch.
    from megatron_ttrace.trace import cleaning
    from megatron_ttrace.trace.budget import shown

    until = time.time() - args.older_than * _DAY
    homes = _homes(args)
    found = {item.path.resolve(): item for home in homes for item in cleaning.find(home)}
    items = [found[path] for path in sorted(found) if found[path].written <= until]
    states = dict.fromkeys(items, "found")
    rows, failed = [], False
    # Those in others first, so that no folder is left that still holds one.
    for item in reversed(items) if args.yes else ():
        try:
            states[item] = "removed" if cleaning.remove(item) else "in use"
        except OSError as error:
            states[item], failed = f"not removed ({error.strerror or error})", True
    for item, state in states.items():
        rows.append(
            {"path": str(item.path), "sort": item.sort, "bytes": item.bytes, "state": state}
        )
        if not args.json:
            days = (time.time() - item.written) / _DAY
            print(f"{shown(item.bytes):>9}  {days:>6.1f} d  {item.sort:<10}  {item.path}  {state}")
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        where = " ".join(str(home) for home in homes)
        total = shown(sum(item.bytes for item in items))
        print(f"{len(items)} in {where}: {total}" if items else f"nothing of ttrace in {where}")
        if items and not args.yes:
            print("nothing was removed: add --yes to remove what is listed", file=sys.stderr)
    return ExitCode.COULD_NOT_CHECK if failed else ExitCode.EQUIVALENT


def _homes(args: argparse.Namespace) -> list[Path]:
    homes = [*args.directories]
    if args.cache:
        cache = os.environ.get("TTRACE_CACHE")
        if not cache:
            raise TTraceError("--cache: TTRACE_CACHE is not set")
        homes.append(Path(cache))
    homes = homes or [Path("ttrace-out")]
    for home in homes:
        if not home.is_dir():
            raise TTraceError(f"{home}: no such directory")
    return homes
