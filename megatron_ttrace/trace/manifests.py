# SPDX-License-Identifier: Apache-2.0
"""Which files are this package's: manifests in the directories in which it creates any.

Each process that creates something in a directory records it there in a manifest of its own,
``.ttrace-files-`` and 16 random hexadecimal digits. Its first line repeats the digits and says
how the directory came to be (:class:`Made`); each further line is a name and a mark: the checksum
of a file that was written whole, the target of a link, ``""`` for a file that grows (a log), or
``null`` after its removal. A name is recorded before the file exists, and manifests move with their
directory and can be copied with it.

A file or link is ours if its directory's manifests record it and the mark fits. A directory is ours
if we made it; one that existed is used if nothing else is in it. Everything is created exclusively
and without following links, relative to an open directory.
"""

import contextlib
import enum
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any, NamedTuple, Self

import xxhash

from megatron_ttrace.trace.errors import TTraceError

_PREFIX = ".ttrace-files-"
MANIFEST = re.compile(re.escape(_PREFIX) + "([0-9a-f]{16})")
_MOST_BYTES = 64 << 20
"""Of a manifest; larger ones are not ours."""
GROWS = ""
TO = "->"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

tokens: dict[tuple[int, int], str] = {}
"""The manifest of this process in a directory, by the directory's device and inode."""
os.register_at_fork(after_in_child=tokens.clear)


class ForeignError(TTraceError):
    """A name that we need is taken by something that this package did not write."""

    def __init__(self, path: Path, *, changed: bool = False) -> None:
        what = "was changed after ttrace wrote it: move it away, or"
        super().__init__(
            f"{path} {what if changed else 'exists and was not written by ttrace:'} "
            "choose another --ttrace-dir or --directory"
        )


class Made(enum.Enum):
    """How a directory came to be."""

    NO = "no"
    """It existed before."""
    MADE = "made"
    WHOLE = "whole"
    """We made it for another program, whose files in it are ours without a record."""


class Manifest(NamedTuple):
    """What one records: how the directory came to be, and the mark of each name."""

    made: Made
    marks: dict[str, str]


class Folder:
    """An open directory, and a context manager; all operations are relative to it.

    They raise ``ForeignError`` for what is not ours, and ``OSError``.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.handle = handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def _entered(self, name: str) -> Self:
        """A directory in this one."""
        handle = os.open(name, _READ | os.O_DIRECTORY, dir_fd=self.handle)
        return type(self)(self.path / name, handle)

    def names(self) -> list[str]:
        """Everything in it."""
        return os.listdir(self.handle)

    def stat(self, name: str) -> os.stat_result | None:
        """Of an entry, not of what a link points to; ``None`` if there is none."""
        try:
            return os.stat(name, dir_fd=self.handle, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _is_folder(self, name: str) -> bool:
        status = self.stat(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    @functools.cached_property
    def manifests(self) -> dict[str, Manifest]:
        """Those in it, by name."""
        owners = {os.geteuid(), os.fstat(self.handle).st_uid}
        parsed = {
            name: _parsed(self._content(name, owners), match[1])
            for name in self.names()
            if (match := MANIFEST.fullmatch(name))
        }
        return {name: manifest for name, manifest in parsed.items() if manifest}

    @functools.cached_property
    def records(self) -> dict[str, set[str]]:
        """What the manifests record: the marks of each name."""
        records: dict[str, set[str]] = {}
        for manifest in self.manifests.values():
            for name, mark in manifest.marks.items():
                records.setdefault(name, set()).add(mark)
        return records

    def _reload(self) -> None:
        """Read the manifests again when they are needed."""
        for name in ("manifests", "records"):
            vars(self).pop(name, None)

    @property
    def is_made(self) -> bool:
        """Whether this package made the directory itself."""
        return any(manifest.made is not Made.NO for manifest in self.manifests.values())

    @property
    def is_whole(self) -> bool:
        """Whether it made the directory for another program, whose files in it are ours."""
        return any(manifest.made is Made.WHOLE for manifest in self.manifests.values())

    def _content(self, name: str, owners: set[int]) -> bytes:
        """Of a manifest that one of ``owners`` wrote; else empty."""
        try:
            handle = os.open(name, _READ, dir_fd=self.handle)
        except OSError:
            return b""
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            regular = stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_BYTES
            return file.read() if regular and status.st_uid in owners else b""

    def _mark(self, name: str) -> str | None:
        """The mark that a file or link has now; ``None`` for anything else."""
        status = self.stat(name)
        if status is not None and stat.S_ISLNK(status.st_mode):
            return f"{TO}{os.readlink(name, dir_fd=self.handle)}"
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        with open(os.open(name, _READ, dir_fd=self.handle), "rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()

    def is_ours(self, name: str) -> bool:
        """Whether an entry was written by this package."""
        status = self.stat(name)
        if status is None:
            return False
        if stat.S_ISDIR(status.st_mode):
            with contextlib.suppress(OSError), self._entered(name) as inside:
                known = {*inside.manifests, *inside.records}
                return inside.is_made or known.issuperset(inside.names())
            return False
        marks = self.records.get(name, set())
        if stat.S_ISREG(status.st_mode) and GROWS in marks:
            return True
        return bool(marks) and self._mark(name) in marks

    def is_file_of_ours(self, name: str) -> bool:
        """Whether an entry is a file or a link of ours, but not a manifest."""
        is_file = not self._is_folder(name) and not MANIFEST.fullmatch(name)
        return is_file and self.is_ours(name)

    def require(self, name: str) -> bool:
        """Refuse an entry that is not ours; returns whether there is one."""
        if self.stat(name) is None:
            return False
        if not self.is_ours(name):
            raise ForeignError(self.path / name, changed=name in self.records)
        return True

    @property
    def _key(self) -> tuple[int, int]:
        status = os.fstat(self.handle)
        return status.st_dev, status.st_ino

    def begin(self, made: Made) -> str:
        """The manifest of this process."""
        token = tokens.get(self._key, "")
        if not token or self.stat(f"{_PREFIX}{token}") is None:
            token = tokens[self._key] = secrets.token_hex(8)
            head = json.dumps({"ttrace": token, "made": made.value})
            self._append(token, head, os.O_CREAT | os.O_EXCL)
        return token

    def record(self, name: str, mark: str | None) -> None:
        """Record what is about to be created under a name, or that it was removed."""
        self._append(self.begin(Made.NO), json.dumps([name, mark]))
        if mark is not None and "records" in vars(self):
            self.records.setdefault(name, set()).add(mark)

    def _append(self, token: str, line: str, more: int = 0) -> None:
        # A line that a full disk cut off does not spoil the next one.
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | more
        handle = os.open(f"{_PREFIX}{token}", flags, 0o644, dir_fd=self.handle)
        with open(handle, "ab", buffering=0) as file:
            file.write((line if more else f"\n{line}").encode())

    def create(self, name: str, mode: int) -> int:
        """A new file, which must not exist, open for writing."""
        if self.stat(name) is not None:
            raise ForeignError(self.path / name)
        self.record(name, GROWS)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, flags, mode, dir_fd=self.handle)
        except FileExistsError as error:
            self.record(name, None)
            raise ForeignError(self.path / name) from error

    def place(self, source: str, name: str, *, replace: bool) -> None:
        """Move a file to a name that must be free, unless an older one of ours is replaced."""
        if not replace:
            try:
                # Unlike a rename it fails if the name was taken meanwhile.
                os.link(source, name, src_dir_fd=self.handle, dst_dir_fd=self.handle)
            except FileExistsError as error:
                raise ForeignError(self.path / name) from error
            except OSError:  # a file system without hard links
                self.require(name)
            else:
                return
        os.rename(source, name, src_dir_fd=self.handle, dst_dir_fd=self.handle)

    def _forget(self, name: str) -> None:
        """Record the removal of a name wherever it is recorded."""
        for token, manifest in self.manifests.items():
            if name in manifest.marks:
                with contextlib.suppress(OSError):
                    self._append(token.removeprefix(_PREFIX), json.dumps([name, None]))
        with contextlib.suppress(OSError):
            self.record(name, None)
        self._reload()

    def remove(self, name: str) -> None:
        """Remove an entry of ours. Of a directory: what is ours in it, then itself if empty."""
        if not self.require(name):
            return
        if not self._is_folder(name):
            os.unlink(name, dir_fd=self.handle)
            self._forget(name)
            return
        with self._entered(name) as inside:
            is_made, is_whole = inside.is_made, inside.is_whole
            is_empty = not is_whole and inside._clear()
        if is_whole:
            shutil.rmtree(name, dir_fd=self.handle)
            return
        # Something that was put into it meanwhile stays, and so does the directory.
        with contextlib.suppress(OSError):
            if is_made and is_empty:
                os.rmdir(name, dir_fd=self.handle)

    def _clear(self) -> bool:
        """Remove all that is ours; returns whether nothing is left."""
        for name in self.names():
            if self._is_folder(name) and self.is_ours(name):
                self.remove(name)
        return self.clear_files()

    def clear_files(self) -> bool:
        """Remove our files and links; returns whether nothing is left."""
        for name in self.names():
            if self.is_file_of_ours(name):
                # The manifests are compacted afterwards: no need to record each removal.
                os.unlink(name, dir_fd=self.handle)
        return self.compact()

    def compact(self) -> bool:
        """Merge the manifests, with what still exists; returns whether the directory is empty."""
        self._reload()
        names = set(self.names())
        kept = {name: self._valid(name, m) for name, m in self.records.items() if name in names}
        old = [*self.manifests]
        if names != set(old) or not self.is_made:
            if len(old) <= 1 and kept.keys() == self.records.keys():
                return False
            if kept or self.is_made:
                tokens.pop(self._key, None)
                try:
                    self.begin(Made.MADE if self.is_made else Made.NO)
                    for name, mark in kept.items():
                        self.record(name, mark)
                except OSError:  # a full disk: the old ones are as good
                    return False
        for name in old:
            os.unlink(name, dir_fd=self.handle)
        self._reload()
        return not self.names()

    def _valid(self, name: str, marks: set[str]) -> str:
        """Of the marks of an entry, which several manifests may record, one that shows it ours."""
        if len(marks) > 1 and GROWS not in marks and (mark := self._mark(name)) in marks:
            return str(mark)
        return min(marks)


def _parsed(content: bytes, token: str) -> Manifest | None:
    """A manifest; ``None`` for anything else."""
    head, *lines = content.split(b"\n")
    match _json(head):
        case {"ttrace": str(own), "made": "no" | "made" | "whole" as made} if own == token:
            pass
        case _:
            return None
    marks: dict[str, str] = {}
    for line in lines:
        match _json(line):
            case [str(name), str(mark)] if name not in ("", ".", "..") and "/" not in name:
                marks[name] = mark
            case [str(name), None]:
                marks.pop(name, None)
    return Manifest(Made(made), marks)


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def opened(path: Path) -> Folder:
    """A directory; a link to it is followed, because the user named it."""
    return Folder(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
