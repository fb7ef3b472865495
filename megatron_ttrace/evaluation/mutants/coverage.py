# SPDX-License-Identifier: Apache-2.0
"""Which lines of Megatron's parallel code a job runs.

``sys.monitoring`` tells each line once and then no more, so a job under watch is as fast as one
without. Lines are written when they come: a rank of a check ends without farewell.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from megatron_ttrace.errors import TTraceError

_NAME = "ttrace mutants"


def record(files: Iterable[Path], log: Path) -> None:
    """From now on append ``[file, line]`` to ``log`` when a line of one of ``files`` first runs.

    Raises:
        TTraceError: when other tools have taken all places.
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

    monitoring.use_tool_id(tool, _NAME)
    monitoring.register_callback(tool, monitoring.events.LINE, line)
    monitoring.set_events(tool, monitoring.events.LINE)


def read(logs: Iterable[Path]) -> set[tuple[str, int]]:
    """The lines that any of several ranks ran."""
    return {
        (str(file), int(number))
        for log in logs
        for file, number in map(json.loads, log.read_text(encoding="utf-8").splitlines())
    }
