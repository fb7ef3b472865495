# SPDX-License-Identifier: Apache-2.0
"""Nights in a SQLite file."""

import math
import sqlite3
from pathlib import Path

import pytest

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.evaluation.nightly.history import History
from megatron_ttrace.evaluation.nightly.records import Gap, NightPart, State
from tests.evaluation.nightly.synthetic import case, month, night


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    """All of it, also after the file was closed; infinite margins and quotes included."""
    strange = night(
        case(name="Robert'); DROP TABLE nights;--", margin=math.inf, note="π\n\x1b[31m"),
        gaps=(Gap(NightPart.MUTANTS, "switched off", by_choice=True),),
        scores={"mutation score": 0.97},
    )
    nights = [*month(3), strange]
    with History(tmp_path / "new" / "history.sqlite") as history:
        for one in nights:
            history.add(one)
    with History(tmp_path / "new" / "history.sqlite") as history:
        assert history.last(10) == nights
        assert history.last(1) == [strange]
        assert history.last(2) == nights[-2:]


def test_last_good(tmp_path: Path) -> None:
    """Nights with a miss, an alarm or a gap are not held up as an example."""
    good = night(day=1)
    with History(tmp_path / "history.sqlite") as history:
        assert history.last_good() is None
        history.add(good)
        history.add(night(case(state=State.MISSED), day=2))
        history.add(night(case(NightPart.MATRIX, state=State.ALARM), day=3))
        history.add(night(gaps=(Gap(NightPart.BUGS, "was killed"),), day=4))
        assert history.last_good() == good


def test_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A night whose cases cannot be kept leaves nothing behind."""
    broken = night(case(seconds="long"))
    with History(tmp_path / "history.sqlite") as history:
        with pytest.raises(TTraceError, match=r"history\.sqlite"):
            history.add(broken)
        assert history.last(5) == []


@pytest.mark.parametrize(
    "content", [b"no database at all, but text" * 40, b"SQLite format 3\0junk"]
)
def test_not_a_history(tmp_path: Path, content: bytes) -> None:
    """One line that names the file."""
    path = tmp_path / "history.sqlite"
    path.write_bytes(content)
    with pytest.raises(TTraceError, match=r"history\.sqlite") as caught:
        History(path)
    assert "\n" not in str(caught.value)


def test_someone_elses_database(tmp_path: Path) -> None:
    """Tables of another program are left alone."""
    path = tmp_path / "history.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE other (x)")
    with pytest.raises(TTraceError, match="choose another --history"):
        History(path)


def test_unwritable(tmp_path: Path) -> None:
    """A folder that is a file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TTraceError, match="history cannot be stored"):
        History(tmp_path / "file" / "history.sqlite")
