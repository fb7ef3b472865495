# SPDX-License-Identifier: Apache-2.0
"""Files of this package, never confused with others': nothing else is replaced or removed.

Each process that creates something in a directory records it there in a manifest of its own,
``.ttrace-files-`` and 16 random hexadecimal digits. Its first line repeats the digits and says
how the directory came to be (:class:`_Made`); each further line is a name and a mark: the checksum
of a file that was written whole, the target of a link, ``""`` for a file that grows (a log), or
``null`` after its removal. A name is recorded before the file exists, and manifests move with their
directory and can be copied with it.

A file or link is ours if its directory's manifests record it and the mark fits. A directory is ours
if we made it; one that existed is used if nothing else is in it. Everything is created exclusively
and without following links, relative to an open directory. No other module of the package renames
or removes anything (``tests/test_house.py``).
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from megatron_ttrace.errors import TTraceError

MANIFEST = re.compile(r"\.ttrace-files-([0-9a-f]{16})")
IGNORE = ".gitignore"
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_PREFIX = ".ttrace-files-"
_MOST_BYTES = 64 << 20
"""Of a manifest; larger ones are not ours."""
_CHUNK = 1 << 20
_GROWS = ""
_TO = "->"

_tokens: dict[tuple[int, int], str] = {}
"""The manifest of this process in a directory, by the directory's device and inode."""
os.register_at_fork(after_in_child=_tokens.clear)


class ForeignError(TTraceError):
    """A name that we need is taken by something that this package did not write."""

    def __init__(self, path: Path, *, changed: bool = False) -> None:
        what = "was changed after ttrace wrote it: move it away, or"
        super().__init__(
            f"{path} {what if changed else 'exists and was not written by ttrace:'} "
            "choose another --ttrace-dir or --directory"
        )


class _Made(enum.Enum):
    """How a directory came to be."""

    NO = "no"
    """It existed before."""
    MADE = "made"
    WHOLE = "whole"
    """We made it for another program, whose files in it are ours without a record."""


class _Folder:
    """An open directory; all operations are relative to it."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.handle = handle
        self._records: dict[str, set[str]] | None = None
        self.made = self.whole = False
        self.manifests: dict[str, dict[str, str]] = {}

    def names(self) -> list[str]:
        """Everything in it."""
        return os.listdir(self.handle)

    def stat(self, name: str) -> os.stat_result | None:
        """Of an entry, not of what a link points to; ``None`` if there is none."""
        try:
            return os.stat(name, dir_fd=self.handle, follow_symlinks=False)
        except FileNotFoundError:
            return None

    @property
    def records(self) -> dict[str, set[str]]:
        """What the manifests record: the marks of each name."""
        if self._records is None:
            owners = {os.geteuid(), os.fstat(self.handle).st_uid}
            self._records = {}
            for name in self.names():
                if (match := MANIFEST.fullmatch(name)) is None:
                    continue
                made, marks = _parsed(self._content(name, owners), match[1])
                if marks is None:
                    continue
                self.manifests[name] = marks
                self.made |= made is not _Made.NO
                self.whole |= made is _Made.WHOLE
                for entry, mark in marks.items():
                    self._records.setdefault(entry, set()).add(mark)
        return self._records

    def _content(self, name: str, owners: set[int]) -> bytes:
        """Of a manifest that one of ``owners`` wrote; else empty."""
        try:
            handle = os.open(name, _READ, dir_fd=self.handle)
        except OSError:
            return b""
        with open(handle, "rb") as file:
            found = os.fstat(handle)
            regular = stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES
            return file.read() if regular and found.st_uid in owners else b""

    def is_ours(self, name: str) -> bool:
        """Whether an entry was written by this package."""
        found = self.stat(name)
        if found is None:
            return False
        if stat.S_ISDIR(found.st_mode):
            with _entered(self, name) as inside:
                return inside is not None and (inside.is_made() or inside.holds_only_ours())
        marks = self.records.get(name, set())
        if stat.S_ISLNK(found.st_mode):
            return f"{_TO}{os.readlink(name, dir_fd=self.handle)}" in marks
        if not stat.S_ISREG(found.st_mode):
            return False
        return _GROWS in marks or (bool(marks) and self._mark(name) in marks)

    def is_made(self) -> bool:
        """Whether this package made the directory itself."""
        return bool(self.records is not None and self.made)

    def is_file_of_ours(self, name: str) -> bool:
        """Whether an entry is a file or a link of ours, but not a manifest."""
        found = self.stat(name)
        if found is None or stat.S_ISDIR(found.st_mode) or MANIFEST.fullmatch(name):
            return False
        return self.is_ours(name)

    def holds_only_ours(self) -> bool:
        """Whether everything in the directory is recorded."""
        records = self.records
        return all(name in self.manifests or name in records for name in self.names())

    def _mark(self, name: str) -> str:
        digest = xxhash.xxh3_128()
        with open(os.open(name, _READ, dir_fd=self.handle), "rb") as file:
            while piece := file.read(_CHUNK):
                digest.update(piece)
        return digest.hexdigest()

    def require(self, name: str) -> bool:
        """Refuse an entry that is not ours; returns whether there is one."""
        if self.stat(name) is None:
            return False
        if not self.is_ours(name):
            raise ForeignError(self.path / name, changed=name in self.records)
        return True

    def begin(self, made: _Made) -> str:
        """The manifest of this process."""
        found = os.fstat(self.handle)
        key = found.st_dev, found.st_ino
        token = _tokens.get(key, "")
        if not token or self.stat(f"{_PREFIX}{token}") is None:
            token = _tokens[key] = secrets.token_hex(8)
            head = json.dumps({"ttrace": token, "made": made.value})
            self._append(token, head, os.O_CREAT | os.O_EXCL)
        return token

    def record(self, name: str, mark: str | None) -> None:
        """Record what is about to be created under a name, or that it was removed."""
        self._append(self.begin(_Made.NO), json.dumps([name, mark]))
        if self._records is not None and mark is not None:
            self._records.setdefault(name, set()).add(mark)

    def _append(self, token: str, line: str, more: int = 0) -> None:
        # A line that a full disk cut off does not spoil the next one.
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | more
        handle = os.open(f"{_PREFIX}{token}", flags, 0o644, dir_fd=self.handle)
        try:
            os.write(handle, (line if more else f"\n{line}").encode())
        finally:
            os.close(handle)

    def create(self, name: str, mode: int) -> int:
        """A new file, which must not exist, open for writing."""
        if self.stat(name) is not None:
            raise ForeignError(self.path / name)
        self.record(name, _GROWS)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, flags, mode, dir_fd=self.handle)
        except FileExistsError as error:
            self.record(name, None)
            raise ForeignError(self.path / name) from error

    def forget(self, name: str) -> None:
        """Record the removal of a name wherever it is recorded."""
        _ = self.records
        for manifest, marks in self.manifests.items():
            if name in marks:
                with contextlib.suppress(OSError):
                    self._append(manifest.removeprefix(_PREFIX), json.dumps([name, None]))
        with contextlib.suppress(OSError):
            self.record(name, None)
        self._records = None
        self.manifests = {}

    def remove(self, name: str) -> None:
        """Remove an entry of ours. Of a directory: what is ours in it, then itself if empty."""
        if not self.require(name):
            return
        found = self.stat(name)
        if found is not None and stat.S_ISDIR(found.st_mode):
            with _entered(self, name) as inside:
                made = inside is not None and inside.is_made()
                whole = inside is not None and inside.whole
                empty = inside is not None and not whole and inside.clear()
            if whole:
                shutil.rmtree(name, dir_fd=self.handle)
                return
            # Something that was put into it meanwhile stays, and so does the directory.
            with contextlib.suppress(OSError):
                if made and empty:
                    os.rmdir(name, dir_fd=self.handle)
            return
        os.unlink(name, dir_fd=self.handle)
        self.forget(name)

    def clear(self) -> bool:
        """Remove all that is ours; returns whether nothing is left."""
        for name in self.names():
            if not MANIFEST.fullmatch(name) and self.is_ours(name):
                self._clear_entry(name)
        return self.compact()

    def _clear_entry(self, name: str) -> None:
        found = self.stat(name)
        if found is not None and stat.S_ISDIR(found.st_mode):
            self.remove(name)
        else:
            # The manifests are compacted afterwards: no need to record each removal.
            os.unlink(name, dir_fd=self.handle)

    def compact(self) -> bool:
        """Merge the manifests, with what still exists; returns whether the directory is empty."""
        self._records, self.manifests = None, {}
        there = set(self.names())
        kept = {name: marks for name, marks in self.records.items() if name in there}
        old = [*self.manifests]
        if there != set(old) or not self.made:
            if len(old) <= 1 and kept.keys() == self.records.keys():
                return False
            if kept or self.made:
                found = os.fstat(self.handle)
                _tokens.pop((found.st_dev, found.st_ino), None)
                try:
                    self.begin(_Made.MADE if self.made else _Made.NO)
                    for name, marks in kept.items():
                        for mark in marks:
                            self.record(name, mark)
                except OSError:  # a full disk: the old ones are as good
                    return False
        for name in old:
            os.unlink(name, dir_fd=self.handle)
        self._records, self.manifests = None, {}
        return not self.names()


_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _parsed(content: bytes, token: str) -> tuple[_Made, dict[str, str] | None]:
    """How we made the directory, and the marks; ``None`` if it is not a manifest."""
    head, *lines = content.split(b"\n")
    match _json(head):
        case {"ttrace": str(own), "made": "no" | "made" | "whole" as made} if own == token:
            pass
        case _:
            return _Made.NO, None
    marks: dict[str, str] = {}
    for line in lines:
        match _json(line):
            case [str(name), str(mark)] if name not in ("", ".", "..") and "/" not in name:
                marks[name] = mark
            case [str(name), None]:
                marks.pop(name, None)
    return _Made(made), marks


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Folder]:
    """A directory; a link to it is followed, because the user named it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _Folder(path, handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _entered(folder: _Folder, name: str) -> Iterator[_Folder | None]:
    """A directory in another one; ``None`` if it cannot be entered."""
    try:
        handle = os.open(name, _READ | os.O_DIRECTORY, dir_fd=folder.handle)
    except OSError:
        yield None
        return
    try:
        yield _Folder(folder.path / name, handle)
    finally:
        os.close(handle)


def make(path: Path, mode: int = 0o777, *, ignored: bool = False, whole: bool = False) -> None:
    """Make a directory, and those above it, unless it exists.

    Args:
        path: of the directory.
        mode: of it, before the process's mask.
        ignored: by git, with everything in it.
        whole: whether everything that any program writes into it is ours.

    Raises:
        OSError: when it cannot be made, or is not a directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    with _opened(path) as folder:
        folder.begin(_Made.WHOLE if whole else _Made.MADE)
    if ignored:
        write(path / IGNORE, ["*\n"])


def is_ours(path: Path) -> bool:
    """Whether this package wrote a file or link, or made a directory. Raises ``OSError``."""
    try:
        with _opened(path.parent) as folder:
            return folder.is_ours(path.name)
    except (FileNotFoundError, NotADirectoryError):
        return False


def require(directory: Path, names: Iterable[str] | None = None) -> None:
    """Refuse a directory in which something else has one of our names.

    Args:
        directory: which; nothing is wrong with an absent one.
        names: which, by default all that there are.

    Raises:
        ForeignError: when there is such a thing.
        OSError: when the directory cannot be read.
    """
    if not directory.is_dir():
        return
    with _opened(directory) as folder:
        for name in folder.names() if names is None else names:
            if not MANIFEST.fullmatch(name):
                folder.require(name)


def create(path: Path, mode: int = 0o666) -> int:
    """A new file, open for reading and writing; an older one of ours is removed first.

    Raises:
        ForeignError: when something else has this name.
        OSError: when it cannot be created.
    """
    with _opened(path.parent) as folder:
        folder.remove(path.name)
        return folder.create(path.name, mode)


def create_new(path: Path, mode: int = 0o666) -> int:
    """A new file, open for reading and writing. Raises as create, also if there is one of ours."""
    with _opened(path.parent) as folder:
        return folder.create(path.name, mode)


def append(path: Path, mode: int = 0o666) -> int:
    """A file of ours, open for appending; it is created if there is none. Raises as create."""
    with _opened(path.parent) as folder:
        if folder.require(path.name):
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            # From here on its content is not what was written at first.
            folder.record(path.name, _GROWS)
            return os.open(path.name, flags, dir_fd=folder.handle)
        os.close(folder.create(path.name, mode))
    return append(path, mode)


def shorten(handle: int, size: int) -> None:
    """Take back what was appended to a file of ours that this module opened. Raises ``OSError``."""
    os.ftruncate(handle, size)


def write(path: Path, pieces: Iterable[str], mode: int = 0o666, *, sealed: bool = True) -> None:
    """Write a whole file: readers see all of it or none. An older one of ours is replaced.

    Args:
        path: of the file.
        pieces: of its text.
        mode: of the file, before the process's mask.
        sealed: whether it is ours no longer once its content has changed.

    Raises:
        ForeignError: when something else has this name.
        OSError: when it cannot be written.
    """
    with _opened(path.parent) as folder:
        there = folder.require(path.name)
        temporary = f".{path.name}.{secrets.token_hex(8)}"
        digest = xxhash.xxh3_128()
        try:
            with open(folder.create(temporary, mode), "wb") as file:
                for piece in pieces:
                    data = piece.encode()
                    digest.update(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            folder.record(path.name, digest.hexdigest() if sealed else _GROWS)
            _place(folder, temporary, path.name, replace=there)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder.handle)
            with contextlib.suppress(OSError):
                folder.record(temporary, None)


def _place(folder: _Folder, temporary: str, name: str, *, replace: bool) -> None:
    if not replace:
        try:
            # Unlike a rename it fails if the name was taken meanwhile.
            os.link(temporary, name, src_dir_fd=folder.handle, dst_dir_fd=folder.handle)
        except FileExistsError as error:
            raise ForeignError(folder.path / name) from error
        except OSError:  # a file system without hard links
            folder.require(name)
        else:
            return
    os.rename(temporary, name, src_dir_fd=folder.handle, dst_dir_fd=folder.handle)


def take(source: Path, target: Path) -> None:
    """Move a file that was just made to a name of ours, on the same file system.

    Raises:
        ForeignError: when something else has this name.
        OSError: when it cannot be moved.
    """
    with _opened(target.parent) as folder:
        there = folder.require(target.name)
        folder.record(target.name, _GROWS)
        _place(folder, os.path.abspath(source), target.name, replace=there)


@contextlib.contextmanager
def written_by_others(path: Path) -> Iterator[Path]:
    """For a library that writes a file itself: yields where, and then moves it to ``path``.

    Raises:
        ForeignError: when something else has this name.
        OSError: when it cannot be written.
    """
    home = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    make(home, PRIVATE_FOLDER, whole=True)
    try:
        yield home / path.name
        take(home / path.name, path)
    finally:
        discard(home)


def wipe(path: Path) -> None:
    """Remove what another program made in a directory that is wholly ours.

    Raises:
        ForeignError: when the directory is not.
        OSError: when it cannot be removed.
    """
    with _opened(path.parent) as folder:
        found = folder.stat(path.name)
        if found is None:
            return
        if not folder.is_made() or not folder.whole:
            raise ForeignError(path)
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(path.name, dir_fd=folder.handle)
        else:
            os.unlink(path.name, dir_fd=folder.handle)


def replace_named(path: Path, content: bytes) -> None:
    """Write a whole file that the user named as the output, whatever it was, as a shell's ``>``.

    Permissions are kept, and a symbolic link to a file remains one. Raises ``OSError``.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        # A pipe or a device.
        target.write_bytes(content)
        return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Remove what is ours at a path, and below it, if there is anything.

    In a directory of ours everything else stays, and then the directory, too.

    Raises:
        ForeignError: when it is not ours.
        OSError: when it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError), _opened(path.parent) as folder:
        folder.remove(path.name)


def discard(path: Path) -> None:
    """The same on the way out, where an error would hide the reason. Never raises."""
    with contextlib.suppress(OSError, ForeignError):
        remove(path)


def remove_files(directory: Path, matches: Callable[[str], bool]) -> None:
    """Remove our files and links in a directory whose names match. Raises ``OSError``."""
    with contextlib.suppress(FileNotFoundError), _opened(directory) as folder:
        for name in folder.names():
            if matches(name) and folder.is_file_of_ours(name):
                folder.remove(name)


def leave(directory: Path) -> None:
    """Remove our files and links in a directory, then itself if we made it and nothing is left.

    Directories in it stay. Raises ``OSError``.
    """
    with _opened(directory) as folder:
        made = folder.is_made()
        for name in folder.names():
            if folder.is_file_of_ours(name):
                os.unlink(name, dir_fd=folder.handle)
        empty = folder.compact()
    with contextlib.suppress(OSError):
        if made and empty:
            os.rmdir(directory)


def recorded(directory: Path) -> set[str]:
    """Names of the files and links that are recorded in a directory. Raises ``OSError``."""
    with _opened(directory) as folder:
        return set(folder.records)


def compact(directory: Path) -> None:
    """Merge the manifests of a directory that no other process writes to. Raises ``OSError``."""
    with _opened(directory) as folder:
        folder.compact()


def move(source: Path, target: Path) -> None:
    """Give a directory of ours another name in the same directory, which must be free.

    Raises:
        ForeignError: when it is not ours.
        OSError: when it cannot be renamed.
    """
    with _opened(source.parent) as folder:
        folder.require(source.name)
        # Fails unless the name is free, or that of an empty directory.
        os.rename(source.name, target.name, src_dir_fd=folder.handle, dst_dir_fd=folder.handle)


def link(path: Path, target: Path) -> None:
    """Make a symbolic link to a directory, in the place of whatever we had there.

    Raises:
        ForeignError: when something else has this name.
        OSError: when it cannot be made.
    """
    with _opened(path.parent) as folder:
        folder.remove(path.name)
        folder.record(path.name, f"{_TO}{target}")
        try:
            os.symlink(target, path.name, target_is_directory=True, dir_fd=folder.handle)
        except FileExistsError as error:
            raise ForeignError(path) from error


def copy(source: Path, target: Path) -> None:
    """Copy the files of a directory, without its manifests, to a new one. Raises ``OSError``."""
    make(target)
    for file in sorted(source.iterdir()):
        if not file.is_file() or MANIFEST.fullmatch(file.name):
            continue
        with file.open("rb") as old, open(create(target / file.name), "wb") as new:
            while piece := old.read(_CHUNK):
                new.write(piece)
