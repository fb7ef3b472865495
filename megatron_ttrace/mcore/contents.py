# SPDX-License-Identifier: Apache-2.0
"""What source files contain: each version of a file is read once in a process and its forks."""

import dataclasses
import functools
import hashlib
import itertools
import os
import re
import stat
from pathlib import Path

# Each begins with a literal: with a choice or a set at its beginning a search is much slower.
_READS = (
    re.compile(rb"getenv\(\s*[\"'](\w+)[\"']"),
    re.compile(rb"environ(?:\.\w+)?[\[(]\s*[\"'](\w+)[\"']"),
)
"""The name of an environment variable in a line that reads it."""
_ASKS = re.compile(rb"[\"'](\w+)[\"'] (?:not )?in (?:os\.)?environ\b")
"""The name of one in a condition on whether it is set."""
_IMPORTS = re.compile(rb"\n *(?:from|import) +(\w+)")
_TEXTS = re.compile(rb"[\"'](\w{3,})")
"""Of a text in the code, what may be the name of a variable, or its begin."""

type _Version = tuple[str, int, int, int]
"""Path, inode, bytes and time of its last change."""


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """Of a file.

    Attributes:
        sha256: of all.
        variables: the environment variables that it reads by their names.
    """

    sha256: bytes
    variables: frozenset[str]


def content_of(file: str | Path) -> Content | None:
    """What a file contains; ``None`` if it is none. Raises ``OSError`` where it cannot be read."""
    version = _version_of(file)
    return None if version is None else _content(version)


@functools.cache
def _content(version: _Version) -> Content:
    text = Path(version[0]).read_bytes()
    asks = b"in os.environ" in text or b"in environ" in text
    names = [name for reads in _READS for name in reads.findall(text)]
    names += _ASKS.findall(text) if asks else []
    return Content(
        hashlib.sha256(text).digest(),
        frozenset(map(bytes.decode, names)),
    )


def packages_of(file: str | Path) -> frozenset[str]:
    """The packages that a file imports, as far as lines say; none of what is no file."""
    version = _version_of(file)
    return frozenset() if version is None else _packages(version)


@functools.cache
def _packages(version: _Version) -> frozenset[str]:
    text = b"\n" + Path(version[0]).read_bytes()
    return frozenset(map(bytes.decode, _IMPORTS.findall(text)))


def texts_of(file: str | Path) -> frozenset[str]:
    """Texts in a file's code, as far as they may be names of variables; none of what is no file."""
    version = _version_of(file)
    return frozenset() if version is None else _texts(version)


@functools.cache
def _texts(version: _Version) -> frozenset[str]:
    return frozenset(map(bytes.decode, _TEXTS.findall(Path(version[0]).read_bytes())))


def _version_of(file: str | Path) -> _Version | None:
    try:
        state = os.stat(file)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(state.st_mode):
        return None
    return str(file), state.st_ino, state.st_size, state.st_mtime_ns


CODE = (".py", ".so")
"""Ends of names of files that Python imports."""


def python_files(
    folder: Path, ends: str | tuple[str, ...] = ".py", *, inside: bool = True
) -> dict[str, str]:
    """The Python files of a package, by their paths in it with slashes, in order.

    ``inside``: also those of folders in it.
    """
    # Neither ``rglob`` nor ``relative_to``, which take ten times as long.
    walk = os.walk(folder) if inside else itertools.islice(os.walk(folder), 1)
    files = (os.path.join(where, name) for where, _, names in walk for name in names)
    python = sorted(file for file in files if file.endswith(ends))
    return {file[len(os.path.join(folder, "")) :].replace(os.sep, "/"): file for file in python}
