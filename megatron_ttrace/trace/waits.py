# SPDX-License-Identifier: Apache-2.0
"""Where ranks wait that make no progress, and whether they can still go on.

Each rank that is stuck leaves a small record in the run's directory; one rank reads them all.
"""

import contextlib
import dataclasses
import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.codec import Rank
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, beginning, clean

_MOST_BYTES = 1 << 16
_MOST_GROUPS = 4
_MOST_RANKS = 8
_ASKED = 99999
"""In the place of a rank: others are asked where they wait."""


class Doing(enum.StrEnum):
    """What a thread does that makes no progress."""

    COLLECTIVE = "collective"
    """It waits in a call of ``torch.distributed``."""
    HANDLE = "handle"
    """It waits for a communication that was started earlier."""
    MEETING = "meeting"
    """It waits for the other ranks between two parts of a check."""
    OTHER = "other"
    """It computes, or is in a call that is not known."""
    ENDED = "ended"
    """The rank that judges has ended the check."""


class Mismatch(enum.StrEnum):
    """Why ranks that wait for each other never go on."""

    SIZES = "their sizes differ"
    ORDER = "their order differs"
    ABSENT = "not all ranks of the group take part"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Where one rank waits.

    Attributes:
        operation: the function of ``torch.distributed``, for instance ``all_reduce``.
        group: what the group is called; empty if that is not known.
        members: global ranks of the group, or the two ranks of a message.
        communicator: PyTorch's name of the group.
        elements: of the tensors whose size all members must have in common; -1 if none must.
        where: the code that called, innermost of Megatron's.
    """

    doing: Doing
    operation: str = ""
    group: str = ""
    members: tuple[Rank, ...] = ()
    communicator: str = ""
    dtype: str = ""
    elements: int = -1
    module: str = ""
    where: str = ""

    @property
    def text(self) -> str:
        """In words, without the rank."""
        if self.doing is Doing.MEETING:
            return "waits for the others after its part of the step"
        place = (f", module {self.module}" if self.module else "") + (
            f", at {self.where}" if self.where else ""
        )
        if self.doing is Doing.HANDLE:
            return clean(f"waits for an asynchronous communication{place}", NOTE_LIMIT)
        if self.doing is not Doing.COLLECTIVE:
            return clean(f"is busy{place}", NOTE_LIMIT)
        size = f" of {self.elements:,} {self.dtype} elements" if self.elements >= 0 else ""
        known = [f"{self.group} group"] if self.group else []
        known += [f"ranks {beginning(self.members, _MOST_RANKS)}"] if self.members else []
        group = f" ({', '.join(known)})" if known else ""
        return clean(f"waits in {self.operation}{size}{group}{place}", NOTE_LIMIT)

    @property
    def alike(self) -> Self:
        """What ranks have in common that wait in the same call, each in its own group."""
        if not self.group or self.operation in ("send", "recv"):
            return self
        return dataclasses.replace(self, members=(), communicator="")


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """Ranks that make no progress; ``mismatch`` if they never will."""

    waits: Mapping[int, Wait]
    mismatch: Mismatch | None

    @property
    def text(self) -> str:
        """One line; ranks that wait at the same place are named together."""
        alike: dict[Wait, list[int]] = {}
        for rank, wait in sorted(self.waits.items()):
            alike.setdefault(wait.alike, []).append(rank)
        parts: dict[str, list[int]] = {}
        for wait, ranks in alike.items():
            texts = {self.waits[rank].text for rank in ranks}
            parts.setdefault(texts.pop() if len(texts) == 1 else wait.text, []).extend(ranks)
        return "; ".join(
            f"rank {ranks[0]} {text}"
            if len(ranks) == 1
            else f"ranks {beginning(ranks, _MOST_RANKS)}: each {text}"
            for text, ranks in list(parts.items())[:_MOST_GROUPS]
        )


def judge(waits: Mapping[int, Wait], size: int) -> Stall:
    """What is known of ranks that make no progress, of ``size`` ranks in all.

    Ranks never go on only if all of them wait in communications, and there is no collective that
    all members of its group have joined alike: that one would end, and release others.
    """
    waiting = {rank: wait for rank, wait in waits.items() if wait.doing is not Doing.OTHER}
    joined = {r: wait for r, wait in waiting.items() if wait.doing is Doing.COLLECTIVE}
    if len(waiting) < size or not joined:
        return Stall(waits, None)
    mismatches = [mismatch for wait in joined.values() if (mismatch := _mismatch(wait, waits))]
    # A collective that all members have joined will end.
    ends = len(mismatches) < len(joined)
    return Stall(waits, None if ends else min(mismatches, key=[*Mismatch].index))


def _mismatch(wait: Wait, waits: Mapping[int, Wait]) -> Mismatch | None:
    """Why a collective does not end; ``None`` if all of its members have joined it."""
    others = [waits[rank] for rank in wait.members]
    if any(other.communicator != wait.communicator for other in others):
        return Mismatch.ABSENT
    if wait.operation in ("send", "recv"):
        return None if {other.operation for other in others} == {"send", "recv"} else Mismatch.ORDER
    if any(other.operation != wait.operation for other in others):
        return Mismatch.ORDER
    if any((other.elements, other.dtype) != (wait.elements, wait.dtype) for other in others):
        return Mismatch.SIZES
    return None


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.wait.json"


def write(folder: Path, rank: int, wait: Wait | None) -> None:
    """Leave where a rank waits; ``None``: it goes on. Never raises."""
    file = _file(folder, rank)
    with contextlib.suppress(OSError, owned.ForeignError):
        if wait is None:
            owned.remove(file)
            return
        owned.make(folder, owned.PRIVATE_FOLDER)
        owned.write(file, [json.dumps(codec.encode(wait))], owned.PRIVATE_FILE, sealed=False)


def ask(folder: Path) -> None:
    """Ask all ranks to leave at once where they wait. Never raises."""
    write(folder, _ASKED, Wait(doing=Doing.ENDED))


def is_asked(folder: Path) -> bool:
    """Whether a rank has asked."""
    return _file(folder, _ASKED).exists()


def forget(folder: Path) -> None:
    """What an earlier run has asked."""
    write(folder, _ASKED, None)


def read(folder: Path, rank: int) -> Wait | None:
    """Where a rank waits; ``None`` if it goes on."""
    try:
        return codec.decode(Wait, codec.parse(codec.read(_file(folder, rank), _MOST_BYTES)))
    except (OSError, ValueError):
        return None
