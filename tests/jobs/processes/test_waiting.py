# SPDX-License-Identifier: Apache-2.0
"""Every wait is limited, and says what it waits for."""

import os
import signal
import sys
from pathlib import Path

import pytest

from megatron_ttrace.jobs import job as jobs
from megatron_ttrace.jobs import script
from megatron_ttrace.jobs.processes import child, ranks, waiting
from megatron_ttrace.jobs.processes.waiting import OutOfTimeError, Patience, Waited
from megatron_ttrace.trace.errors import TTraceError
from tests.jobs.test_job import job

SLEEPS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(3600)\n"


class Clock:
    """A clock that a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(waiting.time, "monotonic", lambda: self.now)

    def look(self, patience: Patience, seconds: float, *waited: Waited) -> None:
        """Look every half second."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            patience.look(waited)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """These scripts import no Megatron, whatever another test of this process imported."""
    monkeypatch.setattr(script, "_enable_on_import", lambda: None)


def rank(tmp_path: Path, number: int = 0) -> Waited:
    """This process as a rank."""
    return Waited(number, os.getpid(), tmp_path / f"{number}.log")


def reference(tmp_path: Path) -> Waited:
    return Waited(0, os.getpid(), tmp_path / "r.log", is_reference=True)


def test_silent_ranks(tmp_path: Path, clock: Clock) -> None:
    """A log that grows is a sign of life of all ranks."""
    several = rank(tmp_path), rank(tmp_path, 1)
    patience = Patience(100.0)
    for _ in range(3):
        clock.look(patience, 99, *several)
        with several[1].log.open("a") as log:
            log.write("iteration\n")
    clock.look(patience, 100, *several)
    with pytest.raises(
        OutOfTimeError, match=r"rank 0 \(pid \d+\), rank 1 .* no output for 100 s; "
    ):
        clock.look(patience, 2, *several)


def test_a_reference_that_takes_too_long(tmp_path: Path, clock: Clock) -> None:
    """Its output extends no limit; the ranks that wait for it are not blamed."""
    process = reference(tmp_path)
    patience = Patience(100.0)
    clock.look(patience, 90, rank(tmp_path))
    for number in range(10):
        process.log.write_text("x" * number)
        clock.look(patience, 10, rank(tmp_path), process)
    with pytest.raises(OutOfTimeError, match=r"the reference run .* did not end within 100 s"):
        clock.look(patience, 2, rank(tmp_path), process)


def test_what_is_waited_for_is_said(tmp_path: Path, clock: Clock) -> None:
    """Messages at intervals that double."""
    lines: list[str] = []
    clock.look(Patience(1800.0, lines.append), 250, rank(tmp_path), reference(tmp_path))
    assert [line.partition(" (log")[0].split("): ")[1] for line in lines] == [
        f"{seconds} s of at most 1800" for seconds in (30, 60, 120, 240)
    ]
    assert all(line.startswith("waiting for the reference run (pid ") for line in lines)


def test_a_machine_that_slept(tmp_path: Path, clock: Clock) -> None:
    """Only time in which this process runs counts."""
    patience = Patience(100.0)
    clock.look(patience, 2, rank(tmp_path))
    clock.now += 100_000
    patience.look([rank(tmp_path)])


def test_ranks_that_hang(tmp_path: Path) -> None:
    """Silent ranks are ended."""
    with pytest.raises(OutOfTimeError, match=r"rank 0 .*, rank 1 .* produced no output for"):
        jobs.run(job(tmp_path, SLEEPS, timeout=3, nproc=2), fork=True)
    pids = [int(ranks.log_of(tmp_path / "out/logs", number).read_text()) for number in (0, 1)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_stopped_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank is reported at once, and is the cause when the others give up."""
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0.2)
    lines: list[str] = []
    pid = tmp_path / "pid"
    code = (
        "import os, pathlib, signal, sys, time\n"
        f"pid = pathlib.Path({str(pid)!r})\n"
        "if os.environ['RANK'] == '1':\n"
        "    pid.write_text(str(os.getpid()))\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not pid.exists() or not pid.read_text(): time.sleep(0.01)\n"
        "state = pathlib.Path('/proc', pid.read_text(), 'stat')\n"
        "while ') T ' not in state.read_text(): time.sleep(0.01)\n"
        "time.sleep(0.9)\nsys.exit('RuntimeError: Connection closed by peer')"
    )
    with pytest.raises(TTraceError, match=r"^rank 1 \(pid \d+\) is stopped; the others gave up"):
        jobs.run(job(tmp_path, code, nproc=2, timeout=60), fork=True, say=lines.append)
    assert any("is stopped; 'kill -CONT" in line for line in lines)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_reference_that_hangs_without_a_fork_server(tmp_path: Path, stopped: bool) -> None:
    """A reference that hangs is ended and named."""
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\n" if stopped else ""
    command = [sys.executable, "-c", f"{stop}{SLEEPS}"]
    how = "is stopped, and nothing happened for" if stopped else "did not end within"
    with pytest.raises(OutOfTimeError, match=rf"the reference run \(pid \d+\) {how}"):
        child.run_subprocess(command, dict(os.environ), tmp_path / "log", 1.0)


def test_variables_of_other_launchers_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's variables are removed: ranks would wait for the agent's store."""
    foreign = {"TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK", "SLURM_PROCID", "ROLE_NAME"}
    for name in foreign:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    code = "import os; print(*sorted(n for n in os.environ if '_' in n)); "
    code += "assert os.environ['MASTER_ADDR'] == '127.0.0.1'"
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, str(tmp_path / "train.py")]
    assert ranks.run_ranks(1, command, tmp_path, fork=False).codes == [0]
    names = ranks.log_of(tmp_path, 0).read_text().split()
    assert "MASTER_PORT" in names
    assert foreign.isdisjoint(names)


def test_nobody_reads_the_terminal(tmp_path: Path) -> None:
    """A rank that reads from the terminal gets end of file instead of being stopped."""
    command = [sys.executable, str(tmp_path / "train.py")]
    (tmp_path / "train.py").write_text("import os; print(os.read(0, 9), flush=True)")
    for fork in (False, True):
        assert ranks.run_ranks(1, command, tmp_path, fork=fork).codes == [0]
        assert ranks.log_of(tmp_path, 0).read_text() == "b''\n"


def test_a_command_line_error(tmp_path: Path) -> None:
    """argparse's own message is the reason."""
    code = "import argparse; argparse.ArgumentParser(prog='train.py').parse_args(['--none'])"
    with pytest.raises(TTraceError, match="rank 0 failed: error: unrecognized arguments: --none"):
        jobs.run(job(tmp_path, code, nproc=2, timeout=60), fork=True)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    """A program that cannot be started is reported."""
    log = tmp_path / "log"
    assert child.run_subprocess(["/nowhere/python"], {}, log) == 1
    assert log.read_text() == "/nowhere/python: No such file or directory\n"


def test_signals_of_a_started_process(tmp_path: Path) -> None:
    """No signal is blocked or ignored, as from a shell."""
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        assert child.run_subprocess([sys.executable, "-c", code], {}, tmp_path / "log") == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (tmp_path / "log").read_text() == "set()\n"
