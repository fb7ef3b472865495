# SPDX-License-Identifier: Apache-2.0
"""Files that a reference run reads, and that are neither code nor named by options.

Such as a configuration beside the script, or the texts of a data set of its own. Python tells its
audit hooks each file that it opens; what a library written in another language opens, or a process
that loads data, is not known.
"""

import contextlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ttrace.jobs import argv
from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.mcore import contents

_WRITES = os.O_WRONLY | os.O_RDWR
_SMALL = 1 << 20
"""Bytes of a file that is read whole, ..."""
_MOST = 1000
"""... if no more files than this were opened."""
_SYSTEM = ("/dev/", "/etc/", "/proc/", "/sys/", "/usr/")
_MADE = ("/.", "/__pycache__/", "/torchinductor", "_indices/", "/site-packages/", "/dist-packages/")
"""In the path of a cache, a setting of a program, or an installed package."""

_COARSE = 0.1
"""Seconds by which the clock of a file system may be late."""

_seen: dict[str, None] = {}
_began: list[float] = []


def watch() -> None:
    """Begin, in a process that makes a reference; there is no end."""
    if not _began and "reference" in argv.ours():
        _began.append(time.time() - _COARSE)
        sys.addaudithook(_hear)


def _hear(event: str, facts: tuple[Any, ...]) -> None:
    if event != "open":
        return
    match facts:
        case (str() as path, _, int() as flags) if not flags & _WRITES:
            # Of a folder that was removed; an error would reach who opens the file.
            with contextlib.suppress(OSError):
                _seen[os.path.abspath(path)] = None


def files(home: Path, apart: Iterable[str | Path]) -> dict[str, str]:
    """What the files contain that were read, by their paths, if they are as they were before.

    Paths are relative to the script's folder ``home`` within it. Not those in the folders
    ``apart``, nor of modules.
    """
    roots = [*map(sysconfig.get_path, ("stdlib", "platstdlib")), *map(os.path.abspath, apart)]
    modules = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    outside = (*_SYSTEM, *(os.path.join(root, "") for root in roots))
    found = {}
    for path in list(_seen):
        if path.startswith(outside) or path in modules or any(part in path for part in _MADE):
            continue
        if os.path.isfile(path) and os.stat(path).st_mtime < _began[0]:
            found[path.removeprefix(os.path.join(home, ""))] = path
    whole = len(found) <= _MOST
    return {name: stamp(path, whole=whole) for name, path in sorted(found.items())}


def changed(known: Mapping[str, str], home: Path, *, absent: bool) -> str:
    """The first of :func:`files` that is different now. ``absent``: also if it is not there."""
    for name, before in known.items():
        path = os.path.join(home, name)
        if not os.path.isfile(path):
            if absent:
                return name
        elif stamp(path, whole=False) != before != stamp(path):
            return name
    return ""


def stamp(path: str, *, whole: bool = True) -> str:
    """A digest of a file, or size and time of a large one. It may hold a secret."""
    status = os.stat(path)
    if whole and status.st_size <= _SMALL and (content := contents.content_of(path)):
        return str(disclosure.identity(content.sha256, allowed=False))
    return f"{status.st_size} bytes of {status.st_mtime_ns}"
