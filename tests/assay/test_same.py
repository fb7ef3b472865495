# SPDX-License-Identifier: Apache-2.0
"""Answers of two versions of the checker."""

import json
from pathlib import Path

from tests.assay import __main__

CULPRIT = {"name": "a", "kind": "output", "direction": "forward", "verdict": "diverged"}


def report(directory: Path, *, cause: str = "factor", tensor: str = "diverged") -> None:
    directory.mkdir(parents=True)
    culprit = {**CULPRIT, "cause": cause, "axes": ["tp"], "explanation": str(directory)}
    summary = {
        "verdict": "diverged",
        "culprits": [culprit],
        "timings": {"all": len(str(directory))},
    }
    (directory / "summary.json").write_text(json.dumps(summary))
    key = {"iteration": 1, "microbatch": 0, "kind": "output", "name": "a", "index": 0}
    (directory / "verdicts.jsonl").write_text(json.dumps({**key, "verdict": tensor}) + "\n")


def compared(tmp_path: Path) -> int:
    return __main__.main(["same", str(tmp_path / "x"), str(tmp_path / "y")])


def test_same(tmp_path: Path, capsys) -> None:
    """Texts and times do not count."""
    report(tmp_path / "x" / "job")
    report(tmp_path / "y" / "job")
    assert compared(tmp_path) == 0
    assert capsys.readouterr().out == "1 reports, 0 differ\n"


def test_differences(tmp_path: Path, capsys) -> None:
    """Each is named: a cause, a tensor, a report that only one side has."""
    for side in "xy":
        report(tmp_path / side / "job", cause=side)
        report(tmp_path / side / "tensor", tensor="diverged" if side == "x" else "pass")
    report(tmp_path / "y" / "more")
    assert compared(tmp_path) == 2
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first.startswith("job: culprits: ")
    assert second == "more: only after"
    assert third.startswith("tensor: not passed: ")
    assert last == "2 reports, 3 differ"


def test_nothing_to_compare(tmp_path: Path, capsys) -> None:
    """One line, exit code 2."""
    assert compared(tmp_path) == 2
    assert "there are no reports" in capsys.readouterr().err
