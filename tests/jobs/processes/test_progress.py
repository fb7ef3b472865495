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
    lines: list[tuple[float, str]] = []
    work = Progress(lambda line: lines.append((now, line)))
    work.tick()
    work("tracing the step")
    for _ in range(52):
        now += 0.25
        work.tick()
        if now == 106.0:
            work.note("rank 1 is stopped")
    assert [line for _, line in lines] == [
        "tracing the step",
        "tracing the step (4 s so far)",
        "rank 1 is stopped",
        "tracing the step (10 s so far)",
    ]
    times = [when for when, _ in lines] + [now]
    assert max(b - a for a, b in itertools.pairwise(times)) < 5.0
    assert EVERY_SECONDS < 5.0


def test_a_notice_is_nothing_that_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it, what was begun before is still being done."""
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines: list[str] = []
    work = Progress(lines.append)
    work.heard("building the model")
    work.heard("notice: dropout is switched off")
    now += 4.75
    work.tick()
    assert lines[1:] == ["notice: dropout is switched off", "building the model (5 s so far)"]


def test_ticks_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an import that does not return; a fork afterwards is of one thread."""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    before = threading.active_count()
    lines: list[str] = []
    work = Progress(lines.append)
    work("importing")
    with work.ticking():
        while len(lines) < 2:
            time.sleep(0.01)
    assert lines[0] == "importing"
    assert threading.active_count() == before


def test_lines_of_a_log_are_repeated_once(tmp_path: Path) -> None:
    """Only complete ones of ours; a log that is begun again is read again."""
    lines: list[str] = []
    log = tmp_path / "log"
    echo = Echo(log, lines.append)
    echo.flush()
    log.write_text("other\nttrace: one\nttrace: tw")
    echo.flush()
    with log.open("a") as file:
        file.write("o\x1b\n")
    echo.flush()
    echo.flush()
    assert lines == ["one", "two\\x1b"]
    log.write_text("ttrace: x\n")
    echo.flush()
    # Other lines of a reference are the candidate's too.
    log.write_text(f"ttrace: running on the CPU\nttrace: {OF_REFERENCE}tracing\n")
    Echo(log, lines.append, OF_REFERENCE).flush()
    assert lines[2:] == ["x", f"{OF_REFERENCE}tracing"]
