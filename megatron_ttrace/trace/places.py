# SPDX-License-Identifier: Apache-2.0
"""Places in code to look at, each with what speaks for it."""

import dataclasses
import re
from enum import StrEnum
from typing import Self

from megatron_ttrace.trace.codec import Count, Record

_PLACE = re.compile(r"(.+):(\d+) \((.+)\)")


class Clue(StrEnum):
    """What speaks for a function as the one that is wrong; report/messages.toml has it in words."""

    REDUCES = "reduces"
    CHANGED = "changed"
    FILE_CHANGED = "file_changed"
    REPLACES = "replaces"
    OWN = "own"
    SILENT = "silent"
    CALLS = "calls"
    MARKS = "marks"
    PASSES = "passes"
    USES = "uses"
    DRAWS = "draws"
    SETS = "sets"
    SELECTS = "selects"
    LOOPS = "loops"
    ORIGIN = "origin"
    STRAYS = "strays"
    GROUP = "group"
    DIVIDES = "divides"
    VALUE = "value"
    SCALES = "scales"
    MOVES = "moves"
    LAYOUT = "layout"
    AXIS = "axis"
    NAMES = "names"
    RAN = "ran"
    BUILT = "built"


@dataclasses.dataclass(frozen=True, slots=True)
class Place(Record):
    """A function to look at; ``line`` is its first line, or that of the call concerned."""

    file: str
    line: Count
    function: str
    clue: Clue

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"

    def is_at(self, other: Self) -> bool:
        """Whether both are in one function, or are there for one changed line."""
        changed = self.clue is other.clue is Clue.CHANGED and self.line == other.line
        return self.file == other.file and (changed or self.function == other.function)

    @classmethod
    def of(cls, text: str, clue: Clue) -> Self | None:
        """The place that ``file:line (function)`` names; ``None`` for any other text."""
        match = _PLACE.fullmatch(text)
        return cls(match[1], int(match[2]), match[3], clue) if match else None
