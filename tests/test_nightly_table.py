# SPDX-License-Identifier: Apache-2.0
"""What only ``make nightly`` runs is listed, and something cheaper stands for it."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NIGHTLY = "pytest.mark.nightly"
ROWS = re.findall(
    r"^\| `(\S+\.py::\w+)`(?: (\(some\)))? \|(?:[^|]*\|)? `(\S+\.py::\w+)` \|$",
    (ROOT / "tests" / "README.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@functools.cache
def marked() -> dict[str, list[str]]:
    """The decorators of every test."""
    return {
        f"{path.relative_to(ROOT / 'tests')}::{node.name}": [*map(ast.unparse, node.decorator_list)]
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }


def test_the_table_is_complete() -> None:
    """One row per nightly test, which says whether all of it is."""
    nightly = {
        name: NIGHTLY not in marks
        for name, marks in marked().items()
        if any(NIGHTLY in mark for mark in marks)
    }
    assert {name: bool(some) for name, some, _ in ROWS} == nightly
    assert len(ROWS) == len(nightly)


def test_what_stands_for_them_always_runs() -> None:
    """None is nightly as a whole."""
    tests = marked()
    assert not [name for _, _, name in ROWS if NIGHTLY in tests.get(name, [NIGHTLY])]
