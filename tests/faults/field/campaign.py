# SPDX-License-Identifier: Apache-2.0
"""Run the field campaign, or parts of it; one JSON line per fault and a table.

Run::

    python -m tests.faults.field.campaign --out DIR [--jobs 2] [--only ID...]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.field import commands, inputs, scripts, secrets
from tests.faults.field.planting import NUMERIC, plant
from tests.faults.field.rows import Row


def faults(out: Path) -> dict[str, Callable[[], Row]]:
    """What to run, by id."""
    found: dict[str, Callable[[], Row]] = {}
    for numeric in NUMERIC:
        found[numeric.id] = functools.partial(plant, numeric, out / numeric.id)
    for quoted in commands.QUOTED:
        found[quoted.id] = functools.partial(commands.read, quoted)
    for name, text in (scripts.STARTS | scripts.EFFECTS).items():
        found[f"script-{name}"] = functools.partial(scripts.read, name, text, out / name)
    for name, words in secrets.SHOWN.items():
        found[f"secret-{name}"] = functools.partial(secrets.shown, name, words)
    found["secret-files"] = functools.partial(secrets.written, out / "secret-files")
    for bad in inputs.BAD:
        found[f"{bad.kind}-{bad.id}"] = functools.partial(inputs.give, bad, out / bad.id)
    return found


def table(rows: Sequence[Row]) -> str:
    """Markdown: injected, kept and broken in each group."""
    lines = ["| group | injected | kept | broken | not injected |", "|---|---|---|---|---|"]
    groups: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    for name, mine in [*groups.items(), ("all", list(rows))]:
        injected = [row for row in mine if row.injected]
        broken = sum(bool(row.problems) for row in injected)
        counts = (len(injected), len(injected) - broken, broken, len(mine) - len(injected))
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Run the field campaign.")
    parser.add_argument("--out", type=Path, required=True, help="directory for everything")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--only", nargs="*", help="beginnings of ids")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = {
        name: run
        for name, run in faults(args.out.resolve()).items()
        if not args.only or name.startswith(tuple(args.only))
    }
    rows = []
    with (
        ThreadPoolExecutor(args.jobs) as pool,
        (args.out / "results.jsonl").open("a", encoding="utf-8") as results,
    ):
        for row in pool.map(lambda run: run(), chosen.values()):
            rows.append(row)
            print(json.dumps(dataclasses.asdict(row)), file=results, flush=True)
            state = "; ".join(row.problems) or "kept"
            print(row.id, state if row.injected else f"NOT INJECTED {row.said}", flush=True)
    print(table(rows))
    return int(any(row.problems for row in rows if row.injected))


if __name__ == "__main__":
    sys.exit(main())
