# SPDX-License-Identifier: Apache-2.0
"""Ranks of several nodes must see the same --ttrace-dir."""

from pathlib import Path

import pytest

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.integration import shared


def test_one_directory(tmp_path: Path) -> None:
    """What one rank marks another one finds."""
    shared.require(tmp_path / "out", shared.prepare(tmp_path / "out"))


@pytest.mark.parametrize("there", [None, "another run"])
def test_another_nodes_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str | None
) -> None:
    """No mark, or one of another run: one line that says what to choose."""
    monkeypatch.setattr(shared, "_PAUSE", 0.0)
    mark = shared.prepare(tmp_path)
    (tmp_path / shared.MARK).unlink()
    if there is not None:
        (tmp_path / shared.MARK).write_text(there)
    with pytest.raises(TTraceError, match="that all nodes share") as caught:
        shared.require(tmp_path, mark)
    assert "\n" not in str(caught.value)


def test_a_late_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that shows up after a moment is enough."""
    mark = shared.prepare(tmp_path)
    (tmp_path / shared.MARK).unlink()
    monkeypatch.setattr(shared.time, "sleep", lambda _: (tmp_path / shared.MARK).write_text(mark))
    shared.require(tmp_path, mark)


def test_not_writable(tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "out").write_text("")
    with pytest.raises(TTraceError, match="not writable"):
        shared.prepare(tmp_path / "out")
