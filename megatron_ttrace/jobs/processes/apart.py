# SPDX-License-Identifier: Apache-2.0
"""Commands of ours that run in a process and an environment of their own."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ttrace.jobs.processes.tether import tethered
from megatron_ttrace.trace import ends
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.sanitise import log_line

_INTERPRETER = re.compile(r"python[0-9.]*|torchrun")


def interpreter_of(words: Sequence[str]) -> str:
    """The Python of the environment in which a command runs, which may be another than this one's.

    It is the one that the command names with its folder, or the one beside such a ``torchrun``.

    Raises:
        TTraceError: when there is none.
    """
    for word in words:
        path = Path(word)
        if path.parent != Path() and _INTERPRETER.fullmatch(path.name):
            beside = path if path.name.startswith("python") else path.with_name("python")
            if not beside.is_file():
                raise TTraceError(f"{beside}: no such interpreter")
            return str(beside.absolute())
    return sys.executable


def ttrace(
    interpreter: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    quiet: bool,
    module: str = "megatron_ttrace",
) -> tuple[int, str]:
    """Run ``ttrace WORDS``, or another module of ours, which ends with this process.

    Returns:
        Its exit code, and why it failed: its own record, or the last it printed.
    """
    with tempfile.TemporaryDirectory(prefix="ttrace-end-") as home:
        file = Path(home) / "end.json"
        process = subprocess.Popen(
            # Not with the current directory on its path, as `ttrace` has not.
            tethered([interpreter, "-P", "-m", module, *words]),
            env={**environment, **ends.announced(file)},
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
