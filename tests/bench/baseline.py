# SPDX-License-Identifier: Apache-2.0
"""The ratios of an earlier run, committed; a ratio that is 20 % larger is a regression."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.bench.sections import Row

FILE = "tests/bench/baseline.json"
PATH = Path(__file__).with_name("baseline.json")
ALLOWED = 1.2


def read() -> dict[str, float]:
    """``section/name: ratio``; without a file none."""
    return json.loads(PATH.read_text(encoding="utf-8"))["ratios"] if PATH.exists() else {}


def update(rows: Sequence[Row], machine: str) -> None:
    """Store the ratios of these rows; those of others stay."""
    ratios = read() | {_key(row): round(row.value, 3) for row in rows if _counts(row)}
    text = json.dumps({"machine": machine, "ratios": dict(sorted(ratios.items()))}, indent=1)
    PATH.write_text(text + "\n", encoding="utf-8")


def regressions(rows: Sequence[Row], known: dict[str, float] | None = None) -> list[str]:
    """One line per ratio that is more than :data:`ALLOWED` times the known one."""
    known = read() if known is None else known
    return [
        f"{_key(row)}: {row.value:.2f} {row.unit}, was {known[_key(row)]:.2f}"
        for row in rows
        if _counts(row) and row.value > ALLOWED * known.get(_key(row), float("inf"))
    ]


def _counts(row: Row) -> bool:
    return row.value is not None and row.is_ratio


def _key(row: Row) -> str:
    return f"{row.section}/{row.name}"
