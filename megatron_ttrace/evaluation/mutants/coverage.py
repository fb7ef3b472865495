# SPDX-License-Identifier: Apache-2.0
"""Which lines of Megatron's parallel code a job runs.

``sys.monitoring`` reports each line once and is then silent, so a monitored job is as fast as any
other. Lines are written as they come, because the ranks of a check end without running exit
handlers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from megatron_ttrace.errors import TTraceError


def record(files: Iterable[Path], log: Path) -> None:
    """From now on append ``[file, line]`` to ``log`` when a line of one of ``files`` first runs.

    Raises:
        TTraceError: when other tools use all places of ``sys.monitoring``.
    """
    wanted = {str(path) for path in files}
    log.parent.mkdir(parents=True, exist_ok=True)
    output = log.open("w", encoding="utf-8", buffering=1)
    monitoring = sys.monitoring
    tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
    if tool is None:
        raise TTraceError("no room for another tool in sys.monitoring: run without a profiler")

    def line(code: CodeType, number: int) -> Any:
        if code.co_filename in wanted:
            output.write(json.dumps([code.co_filename, number]) + "\n")
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "ttrace mutants")
    monitoring.register_callback(tool, monitoring.events.LINE, line)
    monitoring.set_events(tool, monitoring.events.LINE)


def read(logs: Iterable[Path]) -> set[tuple[str, int]]:
    """The lines that any of several ranks ran."""
    return {
        (str(file), int(number))
        for log in logs
        for file, number in map(json.loads, log.read_text(encoding="utf-8").splitlines())
    }
