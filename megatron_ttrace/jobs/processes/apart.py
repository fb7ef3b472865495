# SPDX-License-Identifier: Apache-2.0
"""Commands of ours that run in a process and an environment of their own."""

import atexit
import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.processes import forkserver, signals
from megatron_ttrace.jobs.processes.tether import tethered
from megatron_ttrace.trace import ends
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.sanitise import log_line

_SLOW = "emerging_optimizers"
"""What Megatron imports where it is installed, except for torch."""


def interpreter_of(command: Command) -> str:
    """The Python that a command names, else this process's.

    Raises ``TTraceError`` when it does not exist.
    """
    if not command.interpreter:
        return sys.executable
    python = Path(command.interpreter)
    if not python.is_file():
        raise TTraceError(f"{python}: no such interpreter")
    return str(python.absolute())


def ttrace(
    interpreter: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    quiet: bool,
    module: str = "megatron_ttrace",
    warm: bool = False,
) -> tuple[int, str]:
    """Run ``ttrace WORDS``, or another ``module`` of ours, which ends with this process.

    ``environment`` has all of its variables. With ``quiet`` its progress is not printed, and with
    ``warm`` it is a fork of this process, after :func:`import_torch`, where ``interpreter`` allows
    that.

    Returns:
        Its exit code, and why it failed: its own record, or the last it printed.
    """
    with tempfile.TemporaryDirectory(prefix="ttrace-end-") as home:
        file = Path(home) / "end.json"
        environment = {**environment, **ends.announced(file)}
        process: subprocess.Popen[str] | _Fork
        is_ready = "torch" in sys.modules and "megatron.core" not in sys.modules
        if warm and is_ready and interpreter == sys.executable:
            process = _Fork(module, words, environment)
        else:
            process = subprocess.Popen(
                # Not with the current directory on its path, as `ttrace` has not.
                tethered([interpreter, "-P", "-m", module, *words]),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        last = ""
        try:
            assert process.stderr is not None
            for line in process.stderr:
                last = line.strip() or last
                if line.startswith("[") and not quiet:
                    print(log_line(line), file=sys.stderr, flush=True)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        record = ends.read(file)
    return code, (record.reason if record else "") or last or f"exit code {code}"


def import_torch(script: Path, device: str) -> None:
    """Import what takes longest, so that forks have it: torch, and what else Megatron imports.

    With a GPU nothing is imported: ranks are new processes there.
    """
    path = scripts.as_search_path(scripts.search_path(script))
    with signals.abrupt(), path, forkserver.light_imports():
        from megatron_ttrace import cpu

        if not cpu.needed(device):
            return
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        cpu.activate()
        import torch

        torch.set_num_threads(1)
        with contextlib.suppress(Exception):
            importlib.import_module(_SLOW)


class _Fork:
    """A fork of this process that runs a module of ours, as ``subprocess.Popen`` runs a program."""

    def __init__(self, module: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        self._code: int | None = None

        def program() -> None:
            # Temporary directories of the parent are its own to remove.
            atexit._clear()
            null = os.open(os.devnull, os.O_RDWR)
            forkserver.begin(parent, (null, null, writing), environment)
            # As a new interpreter reads them.
            sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
            sys.pycache_prefix = environment.get("PYTHONPYCACHEPREFIX") or None
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)

        self._child = forkserver.start(program, ExitCode.COULD_NOT_CHECK)
        os.close(writing)
        self.stderr = os.fdopen(reading, encoding="utf-8", errors="replace")

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
            self.stderr.close()
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._child, signal.SIGKILL)
