# SPDX-License-Identifier: Apache-2.0
"""The ``--ttrace-dir``: writable, and one and the same for the ranks of all nodes."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

from megatron_ttrace.errors import TTraceError

MARK = ".ttrace-run"
_ATTEMPTS, _PAUSE = 20, 0.5
"""Network file systems show other nodes' files after some seconds."""


def prepare(directory: Path) -> str:
    """Make the directory and leave a mark in it; return what the mark says.

    Raises:
        TTraceError: when it cannot be written.
    """
    mark = secrets.token_hex(8)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MARK).write_text(mark, encoding="utf-8")
    except OSError as error:
        raise TTraceError(
            f"--ttrace-dir {directory} is not writable ({error.strerror}): choose another"
        ) from error
    return mark


def require(directory: Path, mark: str) -> None:
    """Check that this rank sees the directory that another rank marked.

    Raises:
        TTraceError: when it does not: the reference would be missing here.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE)
        try:
            if (directory / MARK).read_text(encoding="utf-8") == mark:
                return
        except OSError:
            continue
    raise TTraceError(
        f"--ttrace-dir {directory} on {socket.gethostname()} is not the one that rank 0 writes: "
        "choose a directory that all nodes share"
    )
