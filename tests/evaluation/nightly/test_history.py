# SPDX-License-Identifier: Apache-2.0
"""Nights in a file of JSON lines."""

import json
import math
from pathlib import Path

import pytest

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.evaluation.nightly import history
from megatron_ttrace.evaluation.nightly.records import Gap, NightPart, State
from tests.evaluation.nightly.synthetic import case, month, night


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    """All of it; infinite margins, quotes and control characters included."""
    strange = night(
        case(name="Robert'); DROP TABLE nights;--", margin=math.inf, note="π\n\x1b[31m"),
        gaps=(Gap(NightPart.RECIPES, "switched off", by_choice=True),),
        day=9,
    )
    path = tmp_path / "new" / history.FILE
    history.prepare(path)
    for tonight in (*month(3), strange):
        history.append(path, tonight)
    assert history.last_good(path) == strange


def test_one_line_for_each_case(tmp_path: Path) -> None:
    """Each can be read without the others."""
    path = tmp_path / history.FILE
    history.append(path, night())
    head, *cases = map(json.loads, path.read_text().splitlines())
    assert head["part"] is None
    assert head["exit_code"] == 0
    assert [line["name"] for line in cases] == [each.name for each in night().cases]
    assert {line["began"] for line in cases} == {head["began"]}


def test_last_good(tmp_path: Path) -> None:
    """Nights with a miss, an alarm or a gap are not held up as an example."""
    path = tmp_path / history.FILE
    history.prepare(path)
    assert history.last_good(path) is None
    good = night(day=1)
    history.append(path, good)
    history.append(path, night(case(state=State.MISSED), day=2))
    history.append(path, night(case(NightPart.MATRIX, state=State.ALARM), day=3))
    history.append(path, night(gaps=(Gap(NightPart.BUGS, "was killed"),), day=4))
    assert history.last_good(path) == good


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    """A night that was cut off, and foreign text, cost nothing else."""
    path = tmp_path / history.FILE
    history.append(path, night())
    with path.open("a") as file:
        file.write('[1]\n{"part": "bugs"}\nno JSON\n{"part": null, "beg')
    assert history.last_good(path) == night()


def test_unwritable(tmp_path: Path) -> None:
    """A folder that is a file: one line, before the long work."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TTraceError, match="not writable"):
        history.prepare(tmp_path / "file" / history.FILE)
