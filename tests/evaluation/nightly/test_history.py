# SPDX-License-Identifier: Apache-2.0
"""Nights in a file of JSON lines, what their exit codes say, and what changed between two."""

import json
import math
from pathlib import Path

import pytest

from megatron_ttrace.evaluation.nightly import history
from megatron_ttrace.evaluation.nightly.records import Gap, Night, NightPart, State
from megatron_ttrace.trace.errors import TTraceError
from tests.evaluation.nightly.synthetic import case, night, nights

MISSED = case(state=State.MISSED, note="found equivalent")
ALARM = case(NightPart.MATRIX, state=State.ALARM)


@pytest.mark.parametrize(
    ("tonight", "code"),
    [
        (night(), 0),
        (night(MISSED), 2),
        (night(ALARM), 1),
        (night(MISSED, ALARM), 1),
        (night(case(state=State.BROKEN), MISSED), 2),
        (night(case(state=State.BROKEN)), 2),
        (night(gaps=(Gap(NightPart.MATRIX, "was killed"),)), 2),
        (Night("", 0.0, {}, {}), 2),
    ],
)
def test_exit_code(tonight: Night, code: int, tmp_path: Path) -> None:
    """A false alarm outweighs the rest; only a good night is compared with later ones."""
    assert tonight.exit_code == code
    path = tmp_path / history.FILE
    history.prepare(path)
    assert history.last_good(path) is None
    history.append(path, tonight)
    assert history.last_good(path) == (None if code else tonight)
    history.append(path, night(day=2))
    history.append(path, night(MISSED, day=3))
    assert history.last_good(path) == night(day=2)


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    """All of it, a line for each case; what was cut off, and foreign text, costs nothing else."""
    strange = night(
        case(name="Robert'); DROP TABLE nights;--", margin=math.inf, note="π\n\x1b[31m"),
        day=9,
    )
    path = tmp_path / "new" / history.FILE
    history.prepare(path)
    for tonight in (*nights(), strange):
        history.append(path, tonight)
    lines = path.read_text().splitlines()[-2:]
    head, *cases = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (head["part"], head["exit_code"]) == (None, 0)
    assert [(line["began"], line["name"]) for line in cases] == [
        (strange.began, strange.cases[0].name)
    ]
    with path.open("a") as file:
        file.write('[1]\n{"part": "bugs"}\nno JSON\n{"part": null, "beg')
    assert history.last_good(path) == strange


def test_unwritable(tmp_path: Path) -> None:
    """A folder that is a file: one line, before the long work."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TTraceError, match="not writable"):
        history.prepare(tmp_path / "file" / history.FILE)


SINCE = "since the last good night, 2026-01-07T02:00:00+00:00:"


@pytest.mark.parametrize(
    ("tonight", "lines"),
    [
        (night(), []),
        (
            night(MISSED),
            ["missed: bugs 01: found equivalent", SINCE, "  no version and no option "],
        ),
        (
            night(MISSED, versions={"megatron-core": "0.20.0", "numpy": "2"}, options={"a": ""}),
            [
                "  megatron-core: 0.19.2 -> 0.20.0",
                "  numpy: not installed -> 2",
                "  torch: 2.15.0 -> not installed",
                "  bugs: all -> none",
            ],
        ),
        # A bug and a recipe may be called alike.
        (night(case(NightPart.RECIPES, "01", State.ALARM)), ["  1 of the cases above did not run"]),
        (
            night(gaps=(Gap(NightPart.MATRIX, "stopped after 60 s"),)),
            ["matrix is incomplete: stopped after 60 s"],
        ),
    ],
)
def test_changes(tonight: Night, lines: list[str]) -> None:
    """What is wrong, then versions and options that changed since a good night."""
    changes = history.changes(tonight, night(day=7))
    for line in lines:
        assert any(change.startswith(line) for change in changes), changes
    assert bool(changes) == bool(lines)


def test_no_good_night_yet() -> None:
    """The first bad night has nothing to compare with."""
    assert "there is no good night yet to compare with" in history.changes(night(MISSED), None)


@pytest.mark.parametrize(
    ("tonight", "text"),
    [
        (night(), "all good: 2 cases"),
        (
            night(MISSED, ALARM, ALARM, case(state=State.BROKEN)),
            "1 missed, 2 false alarms, 1 could not run",
        ),
        (night(gaps=(Gap(NightPart.MATRIX, "x"),)), "matrix incomplete"),
    ],
)
def test_headline(tonight: Night, text: str) -> None:
    """Counts of what is wrong, or of all cases."""
    assert history.headline(tonight) == text
