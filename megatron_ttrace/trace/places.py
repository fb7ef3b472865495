# SPDX-License-Identifier: Apache-2.0
"""Places in code to look at, each with what speaks for it."""

import dataclasses
import re
from enum import StrEnum
from typing import Self

from megatron_ttrace.trace.codec import Count, Record

_PLACE = re.compile(r"(.+):(\d+) \((.+)\)")


class Clue(StrEnum):
    """What speaks for a function as the one that is wrong."""

    REDUCES = "reduces"
    """A reduction that the finding is about, or any if there is no finding, runs in it."""
    CHANGED = "changed"
    """The user changed it."""
    FILE_CHANGED = "file_changed"
    """The user changed its file: it is not known where."""
    REPLACES = "replaces"
    """It is the user's, and replaces one of Megatron's since that was imported."""
    OWN = "own"
    """It is the user's own code."""
    SILENT = "silent"
    """By its name it communicates, but nothing was sent in it."""
    MARKS = "marks"
    """It built the parameter, and names marks by which parameters are selected."""
    PASSES = "passes"
    """It calls the culprit, and so passes it its input."""
    SETS = "sets"
    """It sets something that the culprit's backward pass uses, or a factor of the step."""
    SELECTS = "selects"
    """It names marks of parameters in the part of the step concerned."""
    LOOPS = "loops"
    """It has a loop, and some tensors lack what others have."""
    ORIGIN = "origin"
    """It makes a number that is off, against the reference's, by the size of the error."""
    GROUP = "group"
    """It names the axis of the cause, but all process groups that it chose lack it."""
    DIVIDES = "divides"
    """It divided the parameter among ranks, with elements that none has, or more than others."""
    VALUE = "value"
    """It, or its class, was given a factor of the size by which the values are wrong."""
    SCALES = "scales"
    """It multiplies or divides."""
    MOVES = "moves"
    """It fills or copies a buffer."""
    LAYOUT = "layout"
    """Lines of it did not run in the reference."""
    AXIS = "axis"
    """Its names contain an axis of the finding."""
    NAMES = "names"
    """Its name has words that are related to the failure."""
    RAN = "ran"
    """It ran in the culprit."""
    BUILT = "built"
    """It built the culprit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place(Record):
    """A function to look at; ``line`` is its first line, or that of the call concerned."""

    file: str
    line: Count
    function: str
    clue: Clue

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"

    @classmethod
    def of(cls, text: str, clue: Clue) -> Self | None:
        """The place that ``file:line (function)`` names; ``None`` for any other text."""
        match = _PLACE.fullmatch(text)
        return cls(match[1], int(match[2]), match[3], clue) if match else None
