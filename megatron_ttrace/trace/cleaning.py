# SPDX-License-Identifier: Apache-2.0
"""Find and remove what checks have left in a directory: runs, and references that runs share.

Only directories with our marks are found, and in them only files with our names are removed. A link
is never followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from megatron_ttrace.trace import shared
from megatron_ttrace.trace.locks import Lock
from megatron_ttrace.trace.sealing import CHECKSUM
from megatron_ttrace.trace.store import META

REFERENCE = "reference"
_ORDER = "overrides.json"
_OF_A_REFERENCE = re.compile(
    r"meta\.json.*|overrides\.json|(rank-\d+\.\d+|start\.\d+)\.safetensors"
    r"|(rank-\d+\.index|tolerances)\.jsonl|.*\.tmp"
)
_LEFT = re.compile(r"\.[\w.-]+\.(building|old)-(link-)?[0-9a-f]{16}")
_MARKS = (shared.LOCK, shared.RANKS, shared.MARK, f".{REFERENCE}.lock")


class Sort(StrEnum):
    """What was left."""

    RUN = "run"
    """A ``--ttrace-dir``: reports, traces, logs."""
    REFERENCE = "reference"
    """An entry of a cache, or a reference without a run."""
    UNFINISHED = "unfinished"
    """Of a build that was killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """A directory that can be removed.

    Attributes:
        path: of it.
        sort: what it is.
        bytes: of all files in it.
        written: when it was written last, in seconds since 1970.
    """

    path: Path
    sort: Sort
    bytes: int
    written: float


def find(home: Path) -> list[Left]:
    """Everything below a directory, itself included, in the order of its paths."""
    return sorted(_below(home), key=lambda one: one.path)


def _below(folder: Path) -> Iterator[Left]:
    sort = _sort_of(folder)
    if sort is not None:
        yield _left(folder, sort)
    # A run may hold others: those that it was compared with.
    own = {REFERENCE, "candidate", "start", "logs"} if sort is Sort.RUN else set()
    if sort in (Sort.REFERENCE, Sort.UNFINISHED):
        return
    try:
        inside = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in inside:
        if entry.is_dir(follow_symlinks=False) and entry.name not in own:
            yield from _below(Path(entry.path))


def _sort_of(folder: Path) -> Sort | None:
    names = {META, _ORDER, shared.MARK}
    there = {name for name in names if _is_file(folder / name)}
    if shared.MARK in there:
        return Sort.RUN
    if _LEFT.fullmatch(folder.name) and _ORDER in there:
        return Sort.UNFINISHED
    if {META, _ORDER} <= there and _is_sealed(folder / META):
        return Sort.REFERENCE
    return None


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_sealed(path: Path) -> bool:
    """Whether a ``meta.json`` begins like ours."""
    with path.open("rb") as file:
        return CHECKSUM.encode() in file.read(200)


def _left(folder: Path, sort: Sort) -> Left:
    size, written = 0, 0.0
    for home, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(home, name))
                size, written = size + found.st_size, max(written, found.st_mtime)
    return Left(folder, sort, size, written)


def remove(one: Left) -> bool:
    """Remove it; returns false when a running check uses it.

    Files that are not ours stay, and so do the directories that hold them.

    Raises:
        OSError: when a file cannot be removed.
    """
    if one.sort is Sort.RUN:
        return _remove_run(one.path)
    name = one.path.name
    if one.sort is Sort.UNFINISHED:
        name = re.split(r"\.(?:building|old)-", name[1:])[0]
    lock = Lock(one.path.parent / f".{name}.lock")
    if not lock.acquire():
        return False
    try:
        shared.remove_listed(one.path, _OF_A_REFERENCE)
        lock.path.unlink(missing_ok=True)
    finally:
        lock.release()
    return True


def _remove_run(folder: Path) -> bool:
    locks = [Lock(folder / name) for name in (shared.LOCK, shared.RANKS)]
    try:
        if not all(lock.acquire() for lock in locks):
            return False
        shared.clean_up(folder)
        remove_reference(folder)
        for name in _MARKS:
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
    finally:
        for lock in locks:
            lock.release()
    return True


def remove_reference(folder: Path) -> None:
    """Remove a run's own reference; of a shared one, the link to it. Raises ``OSError``."""
    home = folder / REFERENCE
    if home.is_symlink() or (home / META).is_file():
        shared.remove_listed(home, _OF_A_REFERENCE)


def remove_tensors(folder: Path, *, own: bool) -> None:
    """Remove all tensors of a run, but not its reports.

    Args:
        folder: of the run.
        own: whether its reference belongs to it; one that was given by the user stays.

    Raises:
        OSError: when a file cannot be removed.
    """
    shared.remove_traces(folder)
    if own:
        remove_reference(folder)
