# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.bench import baseline, table
from tests.bench.sections import SECTIONS, Options, Row

RATIO = Row("traced-step", "TP 2: traced iteration", 2.0, "× plain", "a note")
SIZE = Row("memory", "TP 2: reference", 700.0, "MB")
FAILED = Row("other-tools", "msprobe", None, "× plain", "could not run: no such package")


@pytest.mark.parametrize(("value", "lines"), [(2.0, 0), (2.39, 0), (2.41, 1)])
def test_regression_is_noticed(value, lines):
    """Ratios that are more than 20 % above the known ones; sizes and new rows are none."""
    rows = [RATIO, SIZE, FAILED, Row("whole-check", "new", 100.0, "× plain")]
    rows[0] = Row(RATIO.section, RATIO.name, value, RATIO.unit)
    found = baseline.regressions(rows, {"traced-step/TP 2: traced iteration": 2.0})
    assert len(found) == lines
    assert all("TP 2" in line and "was 2.00" in line for line in found)


def test_baseline_keeps_what_was_not_measured(tmp_path, monkeypatch):
    """Only ratios are stored; those of other runs stay."""
    monkeypatch.setattr(baseline, "PATH", tmp_path / "baseline.json")
    baseline.update([RATIO, SIZE, FAILED], "a machine")
    baseline.update([Row("whole-check", "TP 2", 3.0, "× plain")], "a machine")
    assert baseline.read() == {"whole-check/TP 2": 3.0, "traced-step/TP 2: traced iteration": 2.0}


def test_page_between_its_markers(tmp_path):
    """A row replaces the one of its name; all others, and the rest of the page, stay."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{table.BEGIN}\n{table.END}\n\nafter\n")
    table.write(page, [RATIO, SIZE], "a machine", 5)
    table.write(page, [Row("traced-step", RATIO.name, 1.5, "× plain"), FAILED], "a machine", 5)
    text = page.read_text()
    assert text.startswith("before\n\n")
    assert text.endswith(f"{table.END}\n\nafter\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    figures = [row.split(" | ")[1] for row in rows if not row.startswith(("| what |", "|---"))]
    assert figures == ["700 MB", "could not run", "1.5 × plain"]
    assert text.count("| what | figure |") == text.count("\n**") == 3


def test_page_without_markers_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("text")
    with pytest.raises(ValueError, match="has no line"):
        table.write(tmp_path / "page.md", [RATIO], "a machine", 5)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("section", ["comparison", "traced-step", "whole-check"])
def test_no_regression(section):
    """Ratios within one run are at most 20 % above the committed ones; a second run may show it."""
    assert any(name.startswith(f"{section}/") for name in baseline.read())
    for _ in range(2):
        found = baseline.regressions(list(SECTIONS[section](Options())))
        if not found:
            return
    pytest.fail("\n".join(found))
