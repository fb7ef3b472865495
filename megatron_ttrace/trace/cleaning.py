# SPDX-License-Identifier: Apache-2.0
"""Find and remove what checks have left in a directory: runs, and references that runs share.

Only what is recorded as ours is found and removed (``trace/owned.py``). A link is never followed.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from megatron_ttrace.trace import owned, shared
from megatron_ttrace.trace.locks import Lock
from megatron_ttrace.trace.store import META

_ORDER = "overrides.json"
_LEFT = re.compile(r"\.[\w.-]+\.(building|old)-[0-9a-f]{16}")


class Sort(StrEnum):
    """What was left."""

    RUN = "run"
    """A ``--ttrace-dir``: reports, traces, logs; or a report of ``ttrace diff``."""
    REFERENCE = "reference"
    """An entry of a cache, or a reference without a run."""
    UNFINISHED = "unfinished"
    """Of a build that was killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """A directory that can be removed: bytes of its files, and when it was written last.

    Files of a run that is below another one count there alone.
    """

    path: Path
    sort: Sort
    bytes: int
    written: float


def find(home: Path) -> list[Left]:
    """Everything below a directory, itself included, in the order of its paths."""
    return sorted(_below(home), key=lambda left: left.path)


def _below(folder: Path) -> Iterator[Left]:
    sort = _sort_of(folder)
    if sort is not None:
        yield _left(folder, sort)
    if sort in (Sort.REFERENCE, Sort.UNFINISHED):
        return
    # A run may hold others: those that it was compared with.
    skipped = shared.NAMES if sort is Sort.RUN else ()
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and entry.name not in skipped:
            yield from _below(Path(entry.path))


def _sort_of(folder: Path) -> Sort | None:
    try:
        recorded = owned.recorded(folder)
        marks = recorded.intersection((shared.MARK, shared.SUMMARY))
        if any(owned.is_ours(folder / mark) for mark in marks):
            return Sort.RUN
        if is_unfinished(folder):
            return Sort.UNFINISHED
    except OSError:
        return None
    return Sort.REFERENCE if {META, _ORDER} <= recorded else None


def is_unfinished(folder: Path) -> bool:
    """Whether this is the directory of a build that ended, or is still going on."""
    return _LEFT.fullmatch(folder.name) is not None and owned.is_ours(folder)


def _left(folder: Path, sort: Sort) -> Left:
    size, written = 0, 0.0
    for home, folders, names in os.walk(folder):
        if sort is Sort.RUN and home == str(folder):
            # Other folders in it are found by themselves, or are not ours.
            folders[:] = [name for name in folders if name in shared.NAMES]
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(home, name))
                size, written = size + status.st_size, max(written, status.st_mtime)
    return Left(folder, sort, size, written)


def remove(left: Left) -> bool:
    """Remove what was left; returns false when a running check uses it.

    Files that are not ours stay, and so do the directories that hold them. Raises ``OSError``.
    """
    if left.sort is Sort.RUN:
        return _remove_run(left.path)
    name = left.path.name
    if left.sort is Sort.UNFINISHED:
        name = re.split(r"\.(?:building|old)-", name[1:])[0]
    lock = Lock(left.path.parent / f".{name}.lock")
    if not lock.acquire():
        return False
    try:
        owned.remove(left.path)
        owned.discard(lock.path)
    finally:
        lock.release()
    return True


def _remove_run(folder: Path) -> bool:
    locks = [Lock(folder / name) for name in (shared.LOCK, shared.RANKS)]
    try:
        if not all(lock.acquire() for lock in locks):
            return False
        for name in shared.NAMES:
            owned.discard(folder / name)
        owned.leave(folder)
    finally:
        for lock in locks:
            lock.release()
    return True


def remove_tensors(folder: Path, *, own: bool) -> None:
    """Remove all tensors of a run, but not its reports. Raises ``OSError``.

    ``own``: with its reference, which the user did not give; of a shared one, only the link goes.
    """
    shared.remove_traces(folder)
    if own:
        owned.discard(folder / shared.REFERENCE)
