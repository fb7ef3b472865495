# SPDX-License-Identifier: Apache-2.0
"""Start a process of a job: its environment, its output, its port."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ttrace.jobs.processes.progress import OF_REFERENCE, Echo, say
from megatron_ttrace.jobs.processes.tether import tethered
from megatron_ttrace.jobs.processes.waiting import Patience, Waited
from megatron_ttrace.trace import ends, owned

_OF_LAUNCHERS = (
    *("TORCHELASTIC_", "TTRACE_FORKSERVER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"),
    *("LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_"),
)


def run_subprocess(
    command: Sequence[str], environment: dict[str, str], log: Path, timeout: float | None = None
) -> int:
    """Run the reference in a new process, which dies with this one; returns its exit code.

    After ``timeout`` seconds it is killed, and ``OutOfTimeError`` raised.
    """
    process = start(command, environment, log)
    waited = Waited(0, process.pid, log, is_reference=True)
    patience, echo = Patience(timeout, say), Echo(log, say, OF_REFERENCE)
    try:
        while True:
            try:
                return process.wait(0.2)
            except subprocess.TimeoutExpired:
                patience.look([waited])
            finally:
                echo.flush()
    finally:
        process.kill()
        process.wait()


def start(
    command: Sequence[str], environment: dict[str, str], log: Path, group: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that dies with this one, in the process group ``group``; 0: in a new one."""
    with open(owned.create(log, owned.PRIVATE_FILE), "wb") as output:
        return subprocess.Popen(
            tethered(command),
            env={**environment, **ends.announced(ends.file_of(log))},
            # A group in the background that reads from the terminal is stopped.
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=group,
        )


def environment_of(
    size: int, more: Mapping[str, str], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a job of ``size`` ranks on this machine; each rank adds its own number.

    It is ``base``, by default this process's, without the variables of launchers, with ``more`` and
    a free port.
    """
    variables = os.environ if base is None else base
    inherited = {
        name: value for name, value in variables.items() if not name.startswith(_OF_LAUNCHERS)
    }
    return {
        **inherited,
        **more,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def free_port() -> int:
    """A TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
