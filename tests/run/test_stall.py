# SPDX-License-Identifier: Apache-2.0
"""What is done about ranks that never go on: a check ends, training does not."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.run import loop, stall, states
from megatron_ttrace.trace import waits
from megatron_ttrace.trace.waits import Doing, Wait

TP = Wait(doing=Doing.COLLECTIVE, operation="all_reduce", members=(0, 1), communicator="7")


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stall.Watchdog:
    """Of rank 0 in training; its thread does nothing."""
    monkeypatch.setattr(stall.Watchdog, "_run", lambda self: None)
    return stall.Watchdog(tmp_path, 0, 2, ends_check=False)


def test_training_goes_on(
    watchdog: stall.Watchdog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each thing is printed once, and nothing ends."""
    waits.write(tmp_path, 0, TP)
    waits.write(tmp_path, 1, Wait(doing=Doing.MEETING))
    for _ in range(4):
        watchdog._judge(31.0)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("ttrace: no progress for 31 s: rank 0 waits in all_reduce ")
    assert second.startswith("ttrace: the ranks wait for each other forever, not all ranks ")
    assert waits.read(tmp_path, 0) == TP


def test_a_check_ends_when_it_is_seen_again(
    watchdog: stall.Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first look: what other ranks left may be some seconds old."""
    ended: list[str] = []
    monkeypatch.setattr(watchdog, "_ends_check", True)
    monkeypatch.setattr(watchdog, "_end", lambda line, *, follows: ended.append(line))
    waits.write(tmp_path, 0, TP)
    waits.write(tmp_path, 1, Wait(doing=Doing.MEETING))
    watchdog._judge(31.0)
    assert not ended
    watchdog._judge(36.0)
    assert len(ended) == 1
    wait = waits.read(tmp_path, 0)
    assert wait is not None
    assert wait.doing is Doing.ENDED


def test_meeting_says_itself_what_it_waits_for(
    watchdog: stall.Watchdog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed for ranks that wait between parts of a check."""
    for rank in range(2):
        waits.write(tmp_path, rank, Wait(doing=Doing.MEETING))
    watchdog._judge(31.0)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 2])
def test_a_recording_is_watched(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart that hangs ends as a check does."""
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        stall, "Watchdog", lambda *given, ends_check: started.append((*given, ends_check))
    )
    monkeypatch.setattr(states, "StateSession", lambda *_: None)
    monkeypatch.setattr(loop.fronts, "current", lambda: SimpleNamespace(arguments=lambda: None))
    watch = loop.Watch(Settings(directory=tmp_path, role="state"))
    watch.__dict__["_ranks"] = SimpleNamespace(rank=0, size=size)
    watch._make_recorder()
    assert started == [(tmp_path / "logs", 0, 2, True)] * (size > 1)
