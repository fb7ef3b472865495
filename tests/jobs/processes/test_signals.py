# SPDX-License-Identifier: Apache-2.0
"""Commands that are interrupted or killed at any moment leave one line and no process."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.commands.commands import PROGRAM, Command

pytestmark = pytest.mark.slow

# A launcher as `ttrace check` is one, of tiny ranks, without Megatron.
LAUNCHER = PROGRAM.replace(
    "{body}",
    """
        from pathlib import Path
        from megatron_ttrace.jobs.processes import ranks
        here, fork = Path(sys.argv[1]), sys.argv[2] == "fork"
        print("started", flush=True)
        ranks.run_ranks(3, [sys.executable, str(here / "rank.py")], here / "logs", fork=fork)
        return 0
""",
)
RANK = """
import os, sys, time
if os.environ["RANK"] == "0":
    from pathlib import Path
    from megatron_ttrace.jobs.processes import child, forkserver
    here = Path(__file__).parent
    print("asks", flush=True)
    command, log = [sys.executable, str(here / "reference.py")], here / "log"
    if forkserver.available():
        forkserver.request_ranks(command, [(dict(os.environ), log)], 60.0)
    else:
        child.run_subprocess(command, dict(os.environ), log, 60.0)
print("waits", flush=True)
time.sleep(3600)
"""
REFERENCE = "import time\nprint('runs', flush=True)\ntime.sleep(3600)\n"


def start(tmp_path: Path, how: str) -> Command:
    """Three ranks, one of them with a reference run."""
    for name, text in (("rank", RANK), ("reference", REFERENCE), ("launcher", LAUNCHER)):
        (tmp_path / f"{name}.py").write_text(text)
    return Command(sys.executable, tmp_path / "launcher.py", tmp_path, how, cwd=tmp_path)


def until(command: Command, condition, seconds: float = 400.0) -> None:
    """Wait for it while a command runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert command.process.poll() is None, command.end()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def says(path: Path, text: str) -> bool:
    """Whether a log contains a text."""
    return path.is_file() and text in path.read_text()


ENDS = (
    (signal.SIGINT, 130, "ttrace: interrupted\n"),
    (signal.SIGTERM, 143, "ttrace: ended by SIGTERM\n"),
    (signal.SIGKILL, -9, ""),
    (signal.SIGHUP, 129, "ttrace: ended by SIGHUP\n"),
    (signal.SIGQUIT, -3, ""),
)
ALWAYS = {
    *(("fork", signal.SIGINT), ("spawn", signal.SIGTERM)),
    *(("fork", signal.SIGKILL), ("spawn", signal.SIGKILL)),
}


@pytest.mark.parametrize(
    ("how", "number", "code", "line"),
    [
        pytest.param(how, *end, marks=() if (how, end[0]) in ALWAYS else pytest.mark.nightly)
        for how in ("fork", "spawn")
        for end in ENDS
    ],
)
def test_nothing_outlives_the_launcher(
    tmp_path: Path, how: str, number: int, code: int, line: str
) -> None:
    """However the launcher dies, ranks and reference die at once."""
    command = start(tmp_path, how)
    until(command, lambda: says(tmp_path / "log", "runs"))
    until(command, lambda: len(command.running()) >= 5)
    os.kill(command.process.pid, number)
    assert command.end()[::2] == (code, line)
    assert command.left() == []


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_signal_while_ranks_are_started_is_not_lost(tmp_path: Path, how: str) -> None:
    """Signals at three moments around the first fork."""
    for moment in range(3):
        command = start(tmp_path, how)
        assert command.process.stdout is not None
        assert command.process.stdout.readline() == "started\n"
        time.sleep(0.005 * moment)
        command.ctrl_c()
        code, _, errors = command.end()
        assert (code, errors) == (130, "ttrace: interrupted\n")
        assert command.left() == []


def test_the_reference_dies_with_its_rank(tmp_path: Path) -> None:
    """A reference that a rank started dies with it, as under torchrun."""
    (tmp_path / "reference.py").write_text(REFERENCE)
    script = (
        "import os, sys; from pathlib import Path\n"
        "from megatron_ttrace.jobs.processes.child import run_subprocess\n"
        "here = Path(sys.argv[1])\n"
        "run_subprocess([sys.executable, str(here / 'reference.py')], dict(os.environ), "
        "here / 'log')"
    )
    command = Command(sys.executable, "-c", script, tmp_path, cwd=tmp_path)
    until(command, lambda: says(tmp_path / "log", "runs"))
    command.process.kill()
    assert command.end()[0] == -9
    assert command.left() == []


SWALLOWED = """
import signal, sys, time
from megatron_ttrace.jobs.processes import signals
signals._PATIENCE_SECONDS = 0.3
signals.install()
with signals.orderly():
    try:
        print("ready", flush=True)
        time.sleep(30)
    except BaseException:
        pass
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize("twice", [False, True])
def test_an_interruption_that_others_swallow(tmp_path: Path, twice: bool) -> None:
    """A swallowed signal still takes effect, a second one at once."""
    command = Command(sys.executable, "-c", SWALLOWED, cwd=tmp_path)
    assert command.process.stdout is not None
    assert command.process.stdout.readline() == "ready\n"
    command.ctrl_c()
    if twice:
        time.sleep(0.1)
        command.ctrl_c()
    assert command.end()[::2] == (130, "ttrace: interrupted\n")


def test_nohup_is_respected(tmp_path: Path) -> None:
    """An ignored SIGHUP stays ignored."""
    code = (
        "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from megatron_ttrace.jobs.processes import signals\nsignals.install()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\nprint('alive')"
    )
    assert Command(sys.executable, "-c", code, cwd=tmp_path).end()[:2] == (0, "alive\n")
