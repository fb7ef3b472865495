# SPDX-License-Identifier: Apache-2.0
"""Records of a search for those of the user's changes that make a job diverge.

docs/flags-and-files.md ("Blame") explains the results and fields.
"""

import dataclasses
from enum import StrEnum

from megatron_ttrace.trace.codec import Count, Record
from megatron_ttrace.trace.executed import Execution


class Blaming(StrEnum):
    """How a search for the changes to blame ended."""

    PROVEN = "proven"
    ALONE = "alone"
    OTHERS = "others"
    REMOVED = "removed"
    GOOD_DIVERGES = "good_diverges"
    GOOD_UNCHECKED = "good_unchecked"


@dataclasses.dataclass(frozen=True, slots=True)
class BlamedHunk(Record):
    """A hunk of the difference; ``function`` is a qualified name, empty outside of functions."""

    file: str
    line: Count
    function: str
    removed: tuple[str, ...]
    added: tuple[str, ...]
    ran: Execution


@dataclasses.dataclass(frozen=True, slots=True)
class BlamedChange(Record):
    """Hunks with which alone the job diverges, though not with any fewer of them.

    It then does so in the modules ``culprits`` (layers' numbers as ``*``). Where the good tree
    cannot be checked (``removed``), the job is equivalent without the hunks, and these are the
    culprits of all changes.
    """

    hunks: tuple[BlamedHunk, ...]
    culprits: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Blame(Record):
    """Which of the user's changes make the job diverge, each of ``changes`` by itself."""

    result: Blaming
    since: str
    changes: tuple[BlamedChange, ...] = ()
    hunks: Count = 0
    idle: Count = 0
    checks: Count = 0
    seconds: float = 0.0
    reason: str = ""

    def of(self, culprit: str) -> BlamedChange:
        """The change that a culprit comes from, as far as is known; there must be a change."""
        changes = (change for change in self.changes if culprit in change.culprits)
        return next(changes, self.changes[0])
