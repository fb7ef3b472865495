# SPDX-License-Identifier: Apache-2.0
"""Rows that are continued."""

from pathlib import Path

import pytest

from megatron_ttrace.trace.errors import TTraceError
from tests.assay.mutants import store
from tests.assay.mutants.layouts import LAYOUTS
from tests.assay.mutants.records import Fate, MutantRow, MutantTrial, Phase, Ran
from tests.assay.mutants.synthetic import culprit, mutant

ROW = MutantRow(
    mutant(statement="é / 2"),
    (
        MutantTrial(
            *("tp2", Fate.DIVERGED, 1.0, "told", (culprit("decoder", margin=float("inf")),)),
            Ran(("decoder",), (Phase.SETUP,)),
        ),
    ),
)


def test_round_trip(tmp_path: Path) -> None:
    """What is appended is found again."""
    path = tmp_path / "new" / "rows.jsonl"
    assert store.start(path, "1") == []
    store.append(path, ROW)
    assert store.start(path, "1") == store.load(path) == [ROW]


def test_other_code(tmp_path: Path) -> None:
    """Rows of another campaign are not continued; scoring them is possible."""
    path = tmp_path / "rows.jsonl"
    store.start(path, "1")
    with pytest.raises(TTraceError, match="remove it, or choose another --directory"):
        store.start(path, "2")
    assert store.load(path) == []
    assert store.identity(LAYOUTS) == store.identity(LAYOUTS) != store.identity(LAYOUTS[1:])


@pytest.mark.parametrize("line", ["{", '{"mutant": 1}\n', '{"trials": []}\n', "[]\n"])
def test_damage(line: str, tmp_path: Path) -> None:
    """One message, with the number of the line."""
    path = tmp_path / "rows.jsonl"
    store.start(path, "1")
    store.append(path, ROW)
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(TTraceError, match=r"rows.jsonl:3: .*; remove this line"):
        store.load(path)


def test_no_file(tmp_path: Path) -> None:
    """A file that is missing or empty."""
    with pytest.raises(TTraceError, match="cannot be read"):
        store.load(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(TTraceError, match="is empty"):
        store.load(tmp_path / "rows.jsonl")
