# SPDX-License-Identifier: Apache-2.0
"""Run Python programs as forks of one process that has imported torch and Megatron already.

Importing them takes longer than most tests' work. One process per pytest worker imports once, at
the first request, and forks a child for each program: the same code and arguments, with its own
working directory, environment and output. A test that is about the start itself (imports,
``sys.path``, closed streams, ``sitecustomize``) runs a fresh interpreter instead.

``python tests/warm.py SOCKET WORDS...`` runs a program through a server from a shell.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_END_OF_START = 600.0
_POLL = 0.02
_LATER = (
    *("numpy.ma.extras", "numpy.ctypeslib", "jinja2.ext"),
    *(f"megatron_ttrace.{name}" for name in ("run.stall", "report.later")),
    *(f"megatron_ttrace.{name}" for name in ("cli.main", "jobs.job", "mcore.fronts.megatron_lm")),
)
"""What commands and ranks import when they need it, each of them anew."""

_address: Path | None = None


def run(
    words: Sequence[object], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` warm: ``["-m", MODULE, ...]`` or ``[SCRIPT, ...]``.

    Raises:
        subprocess.TimeoutExpired: after ``timeout`` seconds; the program's processes are ended.
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = (out.fileno(), err.fileno())
        code = _order(address(), command, str(cwd), dict(env), streams, timeout)
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode(errors="replace"))
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, said[0].encode(), said[1].encode())
    return subprocess.CompletedProcess(command, code, *said)


def address() -> Path:
    """The socket of this process's server, which is started when it is first asked for."""
    global _address
    if _address is None:
        home = tempfile.mkdtemp(prefix="warm-")
        path = Path(home, "socket")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(64)
        # A PYTHONPATH names another release of Megatron: that one is imported, then.
        path_of = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", "--serve", str(listening.fileno())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path_of},
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
        )
        listening.close()
        atexit.register(_end, server, home)
        _address = path
    return _address


def _end(server: subprocess.Popen[bytes], home: str) -> None:
    """End it and wait for it: only then what its programs used counts as used by this process."""
    server.kill()
    server.wait()
    shutil.rmtree(home, ignore_errors=True)


def _order(
    path: Path,
    words: Sequence[str],
    cwd: str,
    env: dict[str, str],
    streams: Sequence[int],
    timeout: float,
) -> int | None:
    """Have a program run; its exit code, or ``None`` when it was ended after ``timeout``."""
    order = json.dumps({"words": list(words), "cwd": cwd, "env": env}).encode()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        line.settimeout(_END_OF_START)
        socket.send_fds(line, [b"%016d" % len(order)], list(streams))
        line.sendall(order)
        pid = int(line.recv(16))
        line.settimeout(timeout)
        try:
            return int(line.recv(16) or b"1")
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return None


def _serve(listening: socket.socket) -> None:
    """Fork for each order; tell its process id, and when it ends its exit code."""
    from megatron_ttrace import report
    from megatron_ttrace.cpu import bridge
    from megatron_ttrace.jobs.processes import forkserver

    parent = os.getppid()
    forkserver.preload(ROOT / "launch" / "pretrain_gpt.py")
    if bridge.installed():
        forkserver.preload(ROOT / "tests" / "bridge" / "job.py")
    for name in _LATER:
        with contextlib.suppress(ImportError):  # what has moved is imported by each command
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        save_without_manager()
    report.prepare(wandb=False)
    base = [entry for entry in sys.path if "site-packages" in entry or "lib" in Path(entry).parts]
    running: dict[int, socket.socket] = {}
    while os.getppid() == parent:
        for pid in list(running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                with running.pop(pid) as line, contextlib.suppress(OSError):
                    line.sendall(b"%016d" % os.waitstatus_to_exitcode(status))
        if not select.select([listening], [], [], _POLL)[0]:
            continue
        line = listening.accept()[0]
        size, streams, _, _ = socket.recv_fds(line, 16, 2)
        order = json.loads(line.recv(int(size), socket.MSG_WAITALL))
        child = os.fork()
        if child == 0:
            for one in (listening, line, *running.values()):
                one.close()
            _become(order, streams, base)
        for stream in streams:
            os.close(stream)
        line.sendall(b"%016d" % child)
        running[child] = line


def _become(order: dict, streams: Sequence[int], base: list[str]) -> None:
    """Turn this fork into the program of an order; never returns."""
    code = 1
    try:
        gc.freeze()
        os.setpgid(0, 0)
        # Temporary directories that modules made on import (wandb's) belong to the server: a
        # program that ends must not remove them.
        atexit._clear()
        os.chdir(order["cwd"])
        for number, stream in enumerate(streams, start=1):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(order["env"])
        tempfile.tempdir = None
        words = order["words"]
        sys.orig_argv = [sys.executable, *words]
        own = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        first = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)
        sys.path[:] = [first, *own, *base]
        code = execute(words)
    finally:
        os._exit(code)


def save_without_manager() -> None:
    """Results of saving pass through a process that is spawned and imports torch: seconds.

    Threads of this process write, except with ``--async-save``, which forks.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    make = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = lambda mode="spawn": make("fork")


def execute(words: Sequence[str]) -> int:
    """Run ``python WORDS`` in this process; the exit code that an interpreter would have."""
    code: object = 0
    try:
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - an interpreter would print it and end, too
        traceback.print_exc()
        code = 1
    finally:
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                output.flush()
    return code & 0xFF if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        with socket.socket(fileno=int(sys.argv[2])) as listening_:
            _serve(listening_)
    else:
        ended = _order(Path(sys.argv[1]), sys.argv[2:], os.getcwd(), dict(os.environ), (1, 2), 3600)
        sys.exit(1 if ended is None else ended & 0xFF)
