# SPDX-License-Identifier: Apache-2.0
"""Create, replace and remove files and directories of this package, and nothing else.

Each is recorded as ours (``trace/manifests.py``). What is not is refused with one line
(:class:`ForeignError`) or stays. No other module renames or removes anything, or opens a file for
writing (``tests/test_house.py``). :func:`at_once` is for what a job writes under its own name.

All functions raise ``ForeignError`` when something else has a name that they need, and ``OSError``
when the file system refuses.
"""

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

import xxhash

from megatron_ttrace.trace.manifests import GROWS, MANIFEST, TO, ForeignError, Made, opened

__all__ = ["MANIFEST", "ForeignError"]

IGNORE = ".gitignore"
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


def make(path: Path, mode: int = 0o777, *, ignored: bool = False, whole: bool = False) -> None:
    """Make a directory, and those above it, unless it exists.

    ``mode`` is before the process's mask. ``ignored``: by git, with everything in it. ``whole``:
    everything that any program writes into it is ours.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    with opened(path) as folder:
        folder.begin(Made.WHOLE if whole else Made.MADE)
    if ignored:
        write(path / IGNORE, ["*\n"])


def is_ours(path: Path) -> bool:
    """Whether this package wrote a file or link, or made a directory."""
    try:
        with opened(path.parent) as folder:
            return folder.is_ours(path.name)
    except (FileNotFoundError, NotADirectoryError):
        return False


def require(directory: Path, names: Iterable[str] | None = None) -> None:
    """Refuse a directory in which something else has one of our ``names`` (by default any name).

    An absent directory is accepted.
    """
    if not directory.is_dir():
        return
    with opened(directory) as folder:
        for name in folder.names() if names is None else names:
            if not MANIFEST.fullmatch(name):
                folder.require(name)


def create(path: Path, mode: int = 0o666, *, replace: bool = True) -> int:
    """A new file, open for reading and writing; an older one of ours may be removed first."""
    with opened(path.parent) as folder:
        if replace:
            folder.remove(path.name)
        return folder.create(path.name, mode)


def append(path: Path, mode: int = 0o666) -> int:
    """A file of ours, open for appending; it is created if there is none."""
    with opened(path.parent) as folder:
        if folder.require(path.name):
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            # From here on its content is not what was written at first.
            folder.record(path.name, GROWS)
            return os.open(path.name, flags, dir_fd=folder.handle)
        os.close(folder.create(path.name, mode))
    return append(path, mode)


def expect(path: Path) -> None:
    """Record a file that another of our commands may write; an older one of ours is removed.

    Nothing happens if its directory does not exist.
    """
    with contextlib.suppress(FileNotFoundError), opened(path.parent) as folder:
        folder.remove(path.name)
        folder.record(path.name, GROWS)


def shorten(handle: int, size: int) -> None:
    """Take back what was appended to a file of ours that this module opened."""
    os.ftruncate(handle, size)


def write(path: Path, pieces: Iterable[str], mode: int = 0o666, *, sealed: bool = True) -> None:
    """Write a whole file: readers see all of it or none. An older one of ours is replaced.

    ``mode`` is before the process's mask. A ``sealed`` file is ours no longer once its content has
    changed.
    """
    with opened(path.parent) as folder:
        replace = folder.require(path.name)
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
            folder.record(path.name, digest.hexdigest() if sealed else GROWS)
            folder.place(temporary, path.name, replace=replace)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder.handle)
            with contextlib.suppress(OSError):
                folder.record(temporary, None)


def take(source: Path, target: Path) -> None:
    """Move a file that was just made to a name of ours, on the same file system."""
    with opened(target.parent) as folder:
        replace = folder.require(target.name)
        folder.record(target.name, GROWS)
        folder.place(os.path.abspath(source), target.name, replace=replace)


@contextlib.contextmanager
def written_by_others(path: Path) -> Iterator[Path]:
    """For a library that writes a file itself: yields where, and then moves it to ``path``."""
    home = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    make(home, PRIVATE_FOLDER, whole=True)
    try:
        yield home / path.name
        take(home / path.name, path)
    finally:
        discard(home)


def wipe(path: Path) -> None:
    """Remove what another program made in a directory that is wholly ours."""
    with opened(path.parent) as folder:
        status = folder.stat(path.name)
        if status is None:
            return
        if not folder.is_whole:
            raise ForeignError(path)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path.name, dir_fd=folder.handle)
        else:
            os.unlink(path.name, dir_fd=folder.handle)


def mirror(source: Path, target: Path, is_copied: Callable[[Path], bool]) -> None:
    """Recreate a directory in one that is wholly ours: some of it copied, the rest as links to it.

    ``source`` is only read, and Git's own directory in it is left out; ``target`` must not exist.
    Directories that ``is_copied`` accepts are made anew, with copies of their Python files.
    """
    _require_whole(target.parent)
    _mirror(source, target, is_copied)


def _mirror(source: Path, target: Path, is_copied: Callable[[Path], bool]) -> None:
    os.mkdir(target)
    for entry in os.scandir(source):
        original, path = Path(entry.path), target / entry.name
        if entry.name == ".git" or (target.is_relative_to(original) and not is_copied(original)):
            continue
        # What was compiled earlier fits the copies, whose times are the same.
        is_anew = entry.name == "__pycache__" or is_copied(original)
        if entry.is_dir(follow_symlinks=False) and is_anew:
            _mirror(original, path, is_copied)
        elif entry.is_file() and entry.name.endswith((".py", ".pyc")):
            shutil.copy2(original, path)
        else:
            os.symlink(os.path.realpath(original), path)


def put(path: Path, text: str | None, seconds: int) -> None:
    """Write a file in a directory that is wholly ours, modified at a given time; ``None``: none."""
    _require_whole(path.parent)
    path.unlink(missing_ok=True)
    if text is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(errors="surrogateescape"))
        os.utime(path, (seconds, seconds))


def _require_whole(path: Path) -> None:
    """Refuse a directory that is in none that is wholly ours, wherever links lead."""
    real = path.resolve()
    for parent in (real, *real.parents):
        if parent.is_dir():
            with opened(parent) as folder:
                if folder.is_whole:
                    return
    raise ForeignError(path)


def replace_named(path: Path, content: bytes) -> None:
    """Write a whole file that the user named as the output, whatever it was, as a shell's ``>``.

    Permissions are kept, and a symbolic link to a file remains one.
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


def open_named(path: Path) -> TextIO:
    """A file that the user named as an output, open for writing."""
    return path.open("w", encoding="utf-8")


def remove(path: Path) -> None:
    """Remove what is ours at a path, and below it, if there is anything.

    If anything else is in a directory of ours, it stays, and so does the directory.
    """
    with contextlib.suppress(FileNotFoundError), opened(path.parent) as folder:
        folder.remove(path.name)


def discard(path: Path) -> None:
    """The same on the way out, where an error would hide the reason. Never raises."""
    with contextlib.suppress(OSError, ForeignError):
        remove(path)


def remove_files(directory: Path, matches: Callable[[str], bool]) -> None:
    """Remove our files and links in a directory whose names match."""
    with contextlib.suppress(FileNotFoundError), opened(directory) as folder:
        for name in folder.names():
            if matches(name) and folder.is_file_of_ours(name):
                folder.remove(name)


def leave(directory: Path) -> None:
    """Remove our files and links in a directory, then itself if we made it and nothing is left.

    Directories in it stay.
    """
    with opened(directory) as folder:
        is_made = folder.is_made
        is_empty = folder.clear_files()
    with contextlib.suppress(OSError):
        if is_made and is_empty:
            os.rmdir(directory)


def recorded(directory: Path) -> set[str]:
    """Names of the files and links that are recorded in a directory."""
    with opened(directory) as folder:
        return set(folder.records)


def compact(directory: Path) -> None:
    """Merge the manifests of a directory that no other process writes to."""
    with opened(directory) as folder:
        folder.compact()


@contextlib.contextmanager
def at_once(path: str) -> Iterator[str]:
    """Where the job itself writes a file, which then appears under its name complete, or not."""
    target = os.path.realpath(path)
    part = f"{target}.{secrets.token_hex(4)}{Path(path).suffix}"
    try:
        yield part
        os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def move(source: Path, target: Path) -> None:
    """Give a directory of ours another name in the same directory, which must be free."""
    with opened(source.parent) as folder:
        folder.require(source.name)
        # Fails unless the name is free, or that of an empty directory.
        os.rename(source.name, target.name, src_dir_fd=folder.handle, dst_dir_fd=folder.handle)


def link(path: Path, target: Path) -> None:
    """Make a symbolic link to a directory, in the place of whatever we had there."""
    with opened(path.parent) as folder:
        folder.remove(path.name)
        folder.record(path.name, f"{TO}{target}")
        try:
            os.symlink(target, path.name, target_is_directory=True, dir_fd=folder.handle)
        except FileExistsError as error:
            raise ForeignError(path) from error


def copy(source: Path, target: Path) -> None:
    """Copy the files of a directory, without its manifests, to a new one."""
    make(target)
    for file in sorted(source.iterdir()):
        if not file.is_file() or MANIFEST.fullmatch(file.name):
            continue
        with file.open("rb") as old, open(create(target / file.name), "wb") as new:
            shutil.copyfileobj(old, new)
