# SPDX-License-Identifier: Apache-2.0
"""The matrix as data: names, data sets, and what stands in docs/findings.md."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from megatron_ttrace.evaluation.matrix.configurations import (
    DTYPES,
    LAYOUTS_FILE,
    MODELS,
    Layout,
    configurations,
    select,
)
from megatron_ttrace.evaluation.matrix.suite import MatrixRow, exit_code
from megatron_ttrace.trace.records import Result

FINDINGS = Path(__file__).parents[3] / "docs" / "findings.md"


def test_rows_have_known_fields_only():
    """A misspelt field would be a default; a row of a result table means one job."""
    names = [configuration.name for configuration in configurations()]
    assert len(set(names)) == len(names)
    rows = tomllib.loads(LAYOUTS_FILE.read_text(encoding="utf-8"))["layout"]
    fields = {field.name for field in dataclasses.fields(Layout)}
    assert {name for row in rows for name in row} <= fields
    assert {word for row in rows for word in row.get("models", ())} <= MODELS.keys()
    assert {word for row in rows for word in row.get("dtypes", ())} <= DTYPES.keys()


def test_every_finding_is_written_up():
    """A configuration that must diverge names a heading of docs/findings.md."""
    headings = [line for line in FINDINGS.read_text().splitlines() if line.startswith("## ")]
    for finding in {
        configuration.finding for configuration in configurations() if configuration.finding
    }:
        assert any(finding in heading for heading in headings), finding


def test_uneven_documents_take_the_place_of_the_mock_data(tmp_path):
    """The rest of the command line is the same."""
    mock, uneven = select(configurations(), ["dp2/gpt/fp32", "eod-dp2/gpt/fp32"])
    assert "--mock-data" in mock.case(tmp_path).arguments
    words = uneven.case(tmp_path).arguments
    assert "--mock-data" not in words
    assert set(mock.arguments) <= set(words)
    assert Path(words[words.index("--data-path") + 1]).with_suffix(".bin").exists()


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([(Result.EQUIVALENT, "")], 0),
        ([(Result.DIVERGED, "finding 3")], 0),
        ([(Result.EQUIVALENT, ""), (Result.DIVERGED, "")], 1),
        ([(Result.COULD_NOT_CHECK, ""), (Result.DIVERGED, "")], 1),
        ([(Result.COULD_NOT_CHECK, "")], 2),
        ([(Result.EQUIVALENT, "finding 3")], 2),
        ([(Result.COULD_NOT_CHECK, "finding 3")], 2),
    ],
)
def test_exit_code(rows: list[tuple[Result, str]], code: int) -> None:
    """1 for a healthy job that diverged only; a finding that is not found is outdated."""
    matrix_rows = [
        MatrixRow("x", verdict, 1, 0, 0.0, "", 0.0, finding=finding) for verdict, finding in rows
    ]
    assert exit_code(matrix_rows) == code
