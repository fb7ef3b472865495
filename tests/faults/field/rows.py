# SPDX-License-Identifier: Apache-2.0
"""What became of a fault of the field campaign."""

from __future__ import annotations

import dataclasses
import re

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A fault's outcome; ``problems`` are broken promises."""

    id: str
    group: str
    injected: bool
    problems: tuple[str, ...]
    said: str = ""


def said_wrongly(text: str) -> list[str]:
    """Tracebacks and control characters in what a command printed."""
    found = []
    if "Traceback (most recent call last)" in text or "internal error" in text:
        found.append("a traceback")
    if strange := _CONTROL.search(text):
        found.append(f"a control character {strange[0]!a}")
    return found
