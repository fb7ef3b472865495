# SPDX-License-Identifier: Apache-2.0
"""Commands to interrupt: started in a session of their own; their remaining processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
_MARK = "TTRACE_TEST_MARK"
# A shell without job control starts background jobs with SIGINT ignored; so may be our parent.
_FRESH = (
    "import os, signal, sys\n"
    "for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):\n"
    "    signal.signal(number, signal.SIG_DFL)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])\n"
)


PROGRAM = """
import sys
from megatron_ttrace.cli import main as entry
class Parser:
    _actions = ()
    def parse_args(self, argv):
        return self
    def run(self, args):
        {body}
sys.exit(entry.main(build=lambda words: Parser()))
"""
"""Of a command that runs this code, which returns an exit code."""


class Command:
    """A running command; its descendants carry a mark in their environment."""

    def __init__(self, *words: object, cwd: Path) -> None:
        self.mark = uuid.uuid4().hex
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _MARK: self.mark}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _FRESH, *map(str, words)],
            cwd=cwd,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ctrl_c(self) -> None:
        """Signal the whole foreground group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, timeout: float = 600) -> tuple[int, str, str]:
        """Exit code and both outputs."""
        out, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, errors

    def left(self, seconds: float = 60.0) -> list[str]:
        """Descendants that still run after this time, with their command lines."""
        deadline = time.monotonic() + seconds
        while (pids := self.running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]

    def running(self) -> list[int]:
        """Process ids of everything that carries the mark, without zombies."""
        pids = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_marked = process.environ().get(_MARK) == self.mark
                if is_marked and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    pids.append(process.pid)
        return pids
