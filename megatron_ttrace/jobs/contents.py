# SPDX-License-Identifier: Apache-2.0
"""What source files contain: each version of a file is read once in a process and its forks."""

import dataclasses
import functools
import hashlib
import os
import re
from pathlib import Path

_READS = re.compile(rb"(?:getenv\(|environ(?:\.\w+)?[\[(])\s*[\"'](\w+)[\"']")
"""The name of an environment variable in a line that reads it."""
_ASKS = re.compile(rb"[\"'](\w+)[\"'] (?:not )?in (?:os\.)?environ\b")
"""The name of one in a condition on whether it is set."""


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """The SHA-256 of a file, and the environment variables that it reads by their names."""

    sha256: bytes
    variables: frozenset[str]


def content_of(file: str | Path) -> Content | None:
    """What a file contains; ``None`` if it is none. Raises ``OSError`` where it cannot be read."""
    if not os.path.isfile(file):
        return None
    state = os.stat(file)
    return _content(str(file), state.st_ino, state.st_size, state.st_mtime_ns)


@functools.cache
def _content(file: str, *_: int) -> Content:
    text = Path(file).read_bytes()
    reads = b"environ" in text or b"getenv" in text
    asks = b"in os.environ" in text or b"in environ" in text
    names = [*(_READS.findall(text) if reads else ()), *(_ASKS.findall(text) if asks else ())]
    return Content(hashlib.sha256(text).digest(), frozenset(map(bytes.decode, names)))


def python_files(folder: Path) -> dict[str, str]:
    """The Python files of a package, by their paths in it with slashes, in order."""
    # Neither ``rglob`` nor ``relative_to``, which take ten times as long.
    inside = len(os.path.join(folder, ""))
    files = (os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)
    python = sorted(file for file in files if file.endswith(".py"))
    return {file[inside:].replace(os.sep, "/"): file for file in python}
