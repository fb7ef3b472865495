# SPDX-License-Identifier: Apache-2.0
"""Records of a search for those of the user's changes that make a job diverge."""

import dataclasses
from enum import StrEnum

from megatron_ttrace.trace.codec import Count, Record
from megatron_ttrace.trace.executed import Execution


class Blaming(StrEnum):
    """How a search for the changes to blame ended."""

    PROVEN = "proven"
    """The job diverges with the changes alone, and without them at most as the good tree does."""
    ALONE = "alone"
    """It diverges with the changes alone; without them it cannot be checked."""
    OTHERS = "others"
    """It diverges with the changes alone, and without them in other modules."""
    REMOVED = "removed"
    """It is equivalent without the changes; the good tree cannot be checked."""
    GOOD_DIVERGES = "good_diverges"
    """The good tree diverges in the same modules."""
    GOOD_UNCHECKED = "good_unchecked"
    """The good tree cannot be checked, and the search would take too long without it."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlamedHunk(Record):
    """A hunk of the difference; ``ran`` says where its function ran.

    ``file`` is below the root of the user's tree, ``line`` of the user's file, and ``function`` a
    qualified name, empty outside of functions. ``removed`` are lines of the good tree.
    """

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
    """Which of the user's changes make the job diverge; ``since`` names the good tree.

    Attributes:
        changes: to blame, each by itself.
        hunks: of the whole difference, of which ``idle`` did not run in the job.
        reason: why the good tree, or the rest of the changes, could not be checked; or the modules
            in which the job diverges without the changes.
    """

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
