# SPDX-License-Identifier: Apache-2.0
"""Find a reference for this run, or start the run that makes one."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.flags import Settings
from megatron_ttrace.launching import script as scripts
from megatron_ttrace.launching.logs import died_of
from megatron_ttrace.reference import fingerprint
from megatron_ttrace.reference.arguments import overrides_of
from megatron_ttrace.trace.store import atomic_write, read_meta

_TAIL = 12
_LAUNCHER_VARIABLES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_")

Runner = Callable[[Sequence[str], dict[str, str], Path], int]
"""Runs a command line with an environment and a log file; returns the exit code."""


def ensure(
    args: argparse.Namespace, settings: Settings, *, started: dict[str, Any] | None = None
) -> Path:
    """The directory of a reference trace that fits this candidate. Called on rank 0 only.

    Args:
        args: the candidate's validated arguments.
        settings: of the check.
        started: where the candidate's start state lies and where in the data and the schedule it
            stands, when it began from a checkpoint.

    Raises:
        TTraceError: when a given reference does not fit, or making one failed.
    """
    wanted = fingerprint.identity(args, settings)
    if started is not None:
        wanted["start"] = {name: value for name, value in started.items() if name != "directory"}
    if settings.reference is not None:
        meta = read_meta(settings.reference)
        theirs = meta.get("identity", {})
        other = fingerprint.other_megatron(wanted, theirs)
        if other and not settings.allow_other_megatron:
            raise TTraceError(f"--ttrace-reference {settings.reference}: {other}")
        different = fingerprint.differences(
            wanted, theirs, any_megatron=settings.allow_other_megatron
        )
        if different:
            raise TTraceError(
                f"--ttrace-reference {settings.reference} is of another configuration: "
                + "; ".join(different[:3])
                + ". Leave the flag out to make a fitting one"
            )
        return settings.reference
    directory = settings.directory / "reference"
    name = fingerprint.digest(wanted)
    shared = os.environ.get("TTRACE_CACHE")
    home = Path(shared) / name if shared else directory
    if _fits(home, name):
        print(f"ttrace: using the reference made earlier ({name})", flush=True)
    else:
        _make(home, name, wanted, args, settings, started)
    if home != directory:
        _link(directory, home)
    return directory


def _fits(directory: Path, name: str) -> bool:
    try:
        return bool(read_meta(directory).get("fingerprint") == name)
    except TTraceError:
        return False


def _make(
    home: Path,
    name: str,
    wanted: dict[str, Any],
    args: argparse.Namespace,
    settings: Settings,
    started: dict[str, Any] | None,
) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    overrides = home / "overrides.json"
    atomic_write(
        overrides,
        json.dumps(
            {
                "overrides": overrides_of(args),
                "fingerprint": name,
                "identity": wanted,
                "directory": str(home),
                "started": started,
            },
            default=str,
        ),
    )
    command = [
        *_program(),
        *sys.argv[1:],
        *shlex.split(settings.reference_args),
        *("--ttrace-role", "reference", "--ttrace-overrides", str(overrides)),
    ]
    log = settings.directory / "reference.log"
    print(f"ttrace: making the reference on one device (log: {log})", flush=True)
    began = time.monotonic()
    code = runner()(command, _environment(), log)
    if code != 0 and port_was_taken(log):
        code = runner()(command, _environment(), log)
    if code != 0:
        died = died_of(log)
        if died:
            raise TTraceError(f"the reference run failed: {died} (log: {log})")
        raise TTraceError(
            f"the reference run failed with exit code {code}; its last lines, from {log}:\n"
            + tail(log)
        )
    if not _fits(home, name):
        raise TTraceError(f"the reference run ended without a complete trace; see {log}")
    print(f"ttrace: reference made in {time.monotonic() - began:.1f} s", flush=True)


def runner() -> Runner:
    """How to start the reference run: a fresh process, unless a launcher forks for us."""
    from megatron_ttrace.launching import forkserver

    return forkserver.request if forkserver.available() else run_subprocess


def run_subprocess(command: Sequence[str], environment: dict[str, str], log: Path) -> int:
    """Run to the end in a fresh process, all output into ``log``."""
    with log.open("w", encoding="utf-8") as output:
        return subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode


def tail(log: Path, lines: int = _TAIL) -> str:
    """The last lines of a log that hold anything."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"  ({log} cannot be read: {error})"
    kept = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"  {line[:300]}" for line in kept[-lines:])


def port_was_taken(log: Path) -> bool:
    """Whether a run died because another process took its port between choosing and using it."""
    try:
        return "EADDRINUSE" in log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def free_port() -> int:
    """A TCP port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program() -> list[str]:
    if scripts.is_program:
        return scripts.command(sys.argv[0])
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name not in (None, "__main__"):
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, sys.argv[0]]


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_VARIABLES)
    }
    return kept | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def _link(directory: Path, home: Path) -> None:
    if directory.is_symlink() or directory.is_file():
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)
    directory.symlink_to(home.resolve(), target_is_directory=True)
