# SPDX-License-Identifier: Apache-2.0
"""The figures as text, and in docs/measurements.md between two markers."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.sections import Row

BEGIN, END = "<!-- bench -->", "<!-- end of bench -->"
_SECTION = re.compile(r"\*\*(\S+)\*\*, (\S+)")
_ROW = re.compile(r"\| ([^|]+) \| (?:[^|]+) \|")
_HEAD = ("| what | figure | |", "|---|---|---|")
_SHOWN = ("memory", "other-tools", "traced-step")
"""Sections that users decide by; all are printed, and their ratios are in ``baseline.json``."""


def line(row: Row) -> str:
    """One row, for a terminal."""
    return f"{row.section:<12} {row.name:<44} {shown(row):>22}  {row.note}".rstrip()


def shown(row: Row) -> str:
    """The value with its unit, three digits."""
    return "could not run" if row.value is None else f"{row.value:.3g} {row.unit}"


def write(path: Path, rows: Sequence[Row], machine: str, pairs: int) -> None:
    """Put the rows between the markers; those that were not measured now stay there.

    Each section has the date of its latest measurement.

    Raises:
        ValueError: when the page has no markers.
    """
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    old, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{path} has no line {BEGIN}, or none {END} after it")
    dates, lines = _read(old)
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    for row in (row for row in rows if row.section in _SHOWN):
        dates[row.section] = today
        lines.setdefault(row.section, {})[row.name] = (
            f"| {row.name} | {shown(row)} | {row.note} |".replace("|  |", "| |")
        )
    parts = [f"Latest run: {pairs} pairs, {machine}."]
    for section in sorted(lines):
        parts.append(f"**{section}**, {dates[section]}")
        parts.append("\n".join((*_HEAD, *lines[section].values())))
    path.write_text("\n".join([before + BEGIN, "\n\n".join(parts), END + after]), encoding="utf-8")


def _read(old: str) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The date of each section, and its rows by name."""
    dates: dict[str, str] = {}
    lines: dict[str, dict[str, str]] = {}
    section = ""
    for text in old.splitlines():
        if match := _SECTION.fullmatch(text):
            section = match[1]
            dates[section], lines[section] = match[2], {}
        elif section and (match := _ROW.match(text)) and text not in _HEAD:
            lines[section][match[1]] = text
    return dates, lines
