# SPDX-License-Identifier: Apache-2.0
"""What the log of a process that failed says about why."""

from __future__ import annotations

import re
from pathlib import Path

_ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exception|Exit): ?(.*)$")
_RANK = re.compile(r"^\[rank\d+\]: ")


def died_of(log: Path) -> str:
    """The last exception of a log: Megatron's own words about what it refuses."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    for line in reversed(text.splitlines()):
        said = _RANK.sub("", line)
        if _ERROR.match(said):
            return said[:500]
    return ""
