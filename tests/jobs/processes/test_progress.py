# SPDX-License-Identifier: Apache-2.0
"""Long work is never silent for long, and lines of other processes are repeated."""

import itertools
import threading
import time
from pathlib import Path

import pytest

from megatron_ttrace.jobs.processes import progress
from megatron_ttrace.jobs.processes.progress import EVERY_SECONDS, OF_REFERENCE, Echo, Progress


def test_a_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being done is said again with its duration, less than five seconds later."""
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    said: list[tuple[float, str]] = []
    one = Progress(lambda line: said.append((now, line)))
    one.tick()
    one("tracing the step")
    for _ in range(52):
        now += 0.25
        one.tick()
        if now == 106.0:
            one.note("rank 1 is stopped")
    assert [line for _, line in said] == [
        "tracing the step",
        "tracing the step (4 s so far)",
        "rank 1 is stopped",
        "tracing the step (10 s so far)",
    ]
    times = [when for when, _ in said] + [now]
    assert max(b - a for a, b in itertools.pairwise(times)) < 5.0
    assert EVERY_SECONDS < 5.0


def test_a_notice_is_nothing_that_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it, what was begun before is still being done."""
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    said: list[str] = []
    one = Progress(said.append)
    one.heard("building the model")
    one.heard("notice: dropout is switched off")
    now += 4.75
    one.tick()
    assert said[1:] == ["notice: dropout is switched off", "building the model (5 s so far)"]


def test_ticks_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an import that does not return; a fork afterwards is of one thread."""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    before = threading.active_count()
    said: list[str] = []
    one = Progress(said.append)
    one("importing")
    with one.ticking():
        while len(said) < 2:
            time.sleep(0.01)
    assert said[0] == "importing"
    assert threading.active_count() == before


def test_lines_of_a_log_are_repeated_once(tmp_path: Path) -> None:
    """Only complete ones of ours; a log that is begun again is read again."""
    said: list[str] = []
    log = tmp_path / "log"
    echo = Echo(log, said.append)
    echo.flush()
    log.write_text("other\nttrace: one\nttrace: tw")
    echo.flush()
    with log.open("a") as file:
        file.write("o\x1b\n")
    echo.flush()
    echo.flush()
    assert said == ["one", "two\\x1b"]
    log.write_text("ttrace: x\n")
    echo.flush()
    assert said[2:] == ["x"]


def test_only_a_reference_s_progress_is_repeated(tmp_path: Path) -> None:
    """Its other lines are the candidate's too."""
    said: list[str] = []
    log = tmp_path / "log"
    log.write_text(f"ttrace: running on the CPU\nttrace: {OF_REFERENCE}tracing\n")
    Echo(log, said.append, OF_REFERENCE).flush()
    assert said == [f"{OF_REFERENCE}tracing"]
