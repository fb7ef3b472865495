# SPDX-License-Identifier: Apache-2.0
"""The figures as text, and in docs/measurements.md between two markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.sections import Row

BEGIN, END = "<!-- bench -->", "<!-- end of bench -->"
_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|")


def line(row: Row) -> str:
    """One row, for a terminal."""
    return f"{row.section:<12} {row.name:<44} {shown(row):>22}  {row.note}".rstrip()


def shown(row: Row) -> str:
    """The value with its unit, three digits."""
    return "could not run" if row.value is None else f"{row.value:.3g} {row.unit}"


def write(path: Path, rows: Sequence[Row], machine: str, pairs: int) -> None:
    """Put the rows between the markers; those that were not measured now stay, with their date.

    Raises:
        ValueError: when the page has no markers.
    """
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    old, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{path} has no line {BEGIN}, or none {END} after it")
    measured = {(row.section, row.name) for row in rows} | {("section", "what")}
    kept = [
        one for one in old.splitlines() if (m := _ROW.match(one)) and m.groups() not in measured
    ]
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    new = [f"| {r.section} | {r.name} | {shown(r)} | {r.note} | {today} |" for r in rows]
    how = f"Latest run: {today}, {pairs} pairs, {machine}."
    head = ["| section | what | figure | | measured |", "|---|---|---|---|---|"]
    body = sorted((*kept, *new), key=_section)
    lines = [before + BEGIN, how, "", *head, *body, END + after]
    path.write_text("\n".join(lines), encoding="utf-8")


def _section(row: str) -> str:
    return row.split("|")[1].strip()
