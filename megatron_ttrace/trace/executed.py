# SPDX-License-Identifier: Apache-2.0
"""The records of Megatron's code that was changed, and of where it ran in a check."""

import dataclasses
from enum import StrEnum
from typing import NamedTuple, Self

from megatron_ttrace.trace.changes import Change
from megatron_ttrace.trace.codec import Count, Record
from megatron_ttrace.trace.collectives import Phase
from megatron_ttrace.trace.places import Clue


@dataclasses.dataclass(frozen=True, slots=True)
class Edit(Record):
    """A function of Megatron's that differs from its release or commit.

    Attributes:
        file: from the folder that Megatron was imported from: ``megatron/core/...``.
        function: qualified name; empty for lines outside of functions, which run at import.
        line: the first changed line; 0 if any line of the file may be.
        is_seen: whether it is seen to run: false if a decorator may replace its code.
        replaces: whether it is the user's, and replaces Megatron's since that was imported.
        parts: as of :class:`Change`; empty if any part of it may have changed.
    """

    file: str
    function: str
    line: Count
    is_seen: bool = True
    replaces: bool = False
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: str, change: Change) -> Self:
        """A change of a file."""
        return cls(file, change.name, change.line, change.is_seen, parts=change.parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Edits(Record):
    """What differs from ``since``: a tag, a commit, or an installed release."""

    since: str = ""
    functions: tuple[Edit, ...] = ()


class Executed(NamedTuple):
    """Changed code number ``edit`` ran on a rank: in a module (layers' numbers as ``*``)."""

    edit: Count
    module: str
    phase: Phase


class Execution(StrEnum):
    """Where changed code ran."""

    IN_CULPRIT = "in_culprit"
    ELSEWHERE = "elsewhere"
    NOT_RUN = "not_run"
    NOT_KNOWN = "not_known"


@dataclasses.dataclass(frozen=True, slots=True)
class ChangedFunction(Record):
    """Changed code (:class:`Edit`), and where it ran on any rank, layers' numbers as ``*``."""

    file: str
    function: str
    line: Count
    ran: Execution
    modules: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    replaces: bool = False
    parts: tuple[str, ...] = ()

    @property
    def clue(self) -> Clue:
        """What speaks for it as the cause."""
        if self.replaces:
            return Clue.REPLACES
        return Clue.CHANGED if self.line else Clue.FILE_CHANGED


@dataclasses.dataclass(frozen=True, slots=True)
class ChangedCode(Record):
    """What the user changed in Megatron since ``since``; what ran in a culprit is first."""

    since: str
    functions: tuple[ChangedFunction, ...]
