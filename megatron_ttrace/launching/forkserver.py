# SPDX-License-Identifier: Apache-2.0
"""Start ranks by forking a process that has torch and Megatron imported already.

Without a GPU most of a small check is importing. Here one parent imports, and every rank and every
reference run is a fork of it, so a check costs its training. Not with a GPU: CUDA does not survive
a fork. A rank asks for its reference run over a socket that it inherits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.launching import script as scripts
from megatron_ttrace.versions import quiet_imports

_VARIABLE = "TTRACE_FORKSERVER"
_PR_SET_PDEATHSIG = 1


def preload(script: Path) -> None:
    """Import what every rank of ``script`` needs, in the parent, without starting a thread."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron_ttrace import cpu

    with scripts.as_search_path_of(script), quiet_imports():
        cpu.activate()
        import torch

        torch.set_num_threads(1)
        import megatron.core.models.gpt
        import megatron.training.training  # noqa: F401

        import megatron_ttrace.integration.candidate
        import megatron_ttrace.integration.reference_run  # noqa: F401


def refuses(script: Path) -> str:
    """Why a fork of this process would not be ``python SCRIPT``; empty when it would be.

    The modules imported here must be the very ones that the script would import.
    """
    path = scripts.search_path(script)
    here, there = scripts.imported(), scripts.origins(path)
    for name in scripts.MEGATRON:
        if here.get(name) != there.get(name):
            return f"it has {name} from {there.get(name, 'nowhere')}"
    module = scripts.shadowed(script, path)
    return f"it has a module {module} of its own" if module else ""


def fork(command: Sequence[str], environment: dict[str, str], log: Path) -> int:
    """Fork a child that runs ``[python, script, *args]``, and return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        _die_with_parent()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        _, script, *arguments = command
        scripts.run(script, arguments, scripts.search_path(script))
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process when its parent dies, however it dies.

    Ranks whose parent was killed would wait for each other for hours.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Requests:
    """The parent's end of the socket over which ranks ask for reference runs."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._theirs.set_inheritable(True)

    @property
    def environment(self) -> dict[str, str]:
        """What ranks must find in their environment."""
        return {_VARIABLE: str(self._theirs.fileno())}

    def poll(self) -> tuple[list[str], dict[str, str], Path] | None:
        """The next request, if there is one."""
        try:
            message = self._ours.recv(1 << 20)
        except BlockingIOError:
            return None
        if not message:
            return None
        path = Path(message.decode())
        request: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return request["command"], request["environment"], Path(request["log"])

    def answer(self, code: int) -> None:
        """Tell the rank that its reference run ended."""
        self._ours.send(str(code).encode())

    def close(self) -> None:
        """Close both ends."""
        self._ours.close()
        self._theirs.close()


def available() -> bool:
    """Whether this process was forked by a parent that takes requests."""
    return _VARIABLE in os.environ


def request(command: Sequence[str], environment: dict[str, str], log: Path) -> int:
    """Ask the parent to run a command to its end; returns its exit code."""
    # Command lines outgrow a packet: the packet names a file.
    order = log.with_suffix(".request.json")
    order.write_text(
        json.dumps({"command": list(command), "environment": environment, "log": str(log)}),
        encoding="utf-8",
    )
    with socket.socket(fileno=os.dup(int(os.environ[_VARIABLE]))) as line:
        line.send(str(order).encode())
        return int(line.recv(64).decode())
