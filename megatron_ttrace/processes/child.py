# SPDX-License-Identifier: Apache-2.0
"""Run one process to its end, and find a free port."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_ttrace.processes.tether import tethered
from megatron_ttrace.processes.waiting import Patience, Waited


def run_subprocess(
    command: Sequence[str], environment: dict[str, str], log: Path, timeout: float | None = None
) -> int:
    """Run the reference in a new process, which dies with this one; returns its exit code.

    Raises:
        OutOfTimeError: when it has not ended after ``timeout`` seconds; it is killed then.
    """
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            tethered(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    waited = Waited("the reference run", process.pid, log, is_reference=True)
    patience = Patience(timeout, lambda line: print(f"ttrace: {line}", flush=True))
    try:
        while True:
            try:
                return process.wait(0.2)
            except subprocess.TimeoutExpired:
                patience.look([waited])
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
