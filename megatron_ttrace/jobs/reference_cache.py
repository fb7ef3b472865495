# SPDX-License-Identifier: Apache-2.0
"""References on disk: looked up, made once, shared between runs.

A reference is built in a directory beside its final place and renamed into it when it is complete
and verified; it never changes after that. ``DIR/reference`` may be a link into a cache that runs
share (``TTRACE_CACHE``): the link is replaced, and nothing is ever written through it. While one
run builds an entry of the cache, others that want the same entry wait for it.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ttrace.jobs import fingerprint
from megatron_ttrace.jobs.processes.progress import say
from megatron_ttrace.trace import cleaning, owned, shared
from megatron_ttrace.trace.errors import TTraceError, reported
from megatron_ttrace.trace.locks import Lock
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.sealing import CHECKSUM
from megatron_ttrace.trace.store import META, meta_as, read_meta, verify

_POLL_SECONDS = 0.2
_BUILDING, _OLD = ".building-", ".old-"

SHARED = "TTRACE_CACHE_SHARED"
"""Environment variable: when set, everybody who can write to the cache is trusted."""

type Make = Callable[[Path], None]
"""Makes a reference in a directory."""


def mode() -> int:
    """Of the directories of references: private, unless the cache is shared with others."""
    return 0o777 if os.environ.get(SHARED) else owned.PRIVATE_FOLDER


def place() -> Path | None:
    """Where the user wants a cache of references, if anywhere."""
    cache = os.environ.get("TTRACE_CACHE")
    return Path(cache).absolute() if cache else None


def obtain(directory: Path, cache: Path | None, name: str, make: Make, patience: float) -> str:
    """Find the reference with fingerprint ``name``, in the cache if there is one, or make it.

    A run looks for it in ``directory``, a link if it is in the cache. Another run that is making
    the same one is waited for, ``patience`` seconds. Raises ``TTraceError`` when it cannot be
    written, or another run kept it locked too long.

    Returns:
        The checksum of its ``meta.json``, which was verified with all its files.
    """
    checksum = None
    if cache and (why := distrusted(cache, name)):
        say(f"notice: the cache is not used: {why}, or set {SHARED}=1 to trust all who can")
    elif cache:
        checksum = _obtain(cache / name, name, make, patience, mode())
    if cache and checksum is not None:
        _link(directory, cache / name)
    else:
        checksum = _obtain(directory, name, make, patience)
    if checksum is None:
        raise TTraceError(f"{directory} is being made by another run: choose another --ttrace-dir")
    return checksum


def distrusted(cache: Path, name: str) -> str:
    """Why others could change entry ``name`` of a cache, and what to do; empty if they cannot.

    An absent cache will be made for this user alone.
    """
    if os.environ.get(SHARED):
        return ""
    for path in (cache, cache / name, cache / name / META):
        try:
            status = path.stat()
        except OSError:
            continue
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to another user; choose a cache of your own"
        is_shared = path == cache and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_shared:
            return f"others can write to {path}; chmod go-w it"
    return ""


def _obtain(
    home: Path, name: str, make: Make, patience: float, mode: int = owned.PRIVATE_FOLDER
) -> str | None:
    """As :func:`obtain`, at ``home``; ``None`` when another run kept it locked too long.

    A directory that is absent is made with ``mode``.
    """
    checksum, _ = _look(home, name)
    if checksum:
        say(f"using the reference made earlier ({name}): all layouts of a job have the same")
        return checksum
    with _writing(home, "choose another --ttrace-dir or TTRACE_CACHE"):
        owned.make(home.parent, mode, ignored=True)
        lock = Lock(home.parent / f".{home.name}.lock")
        if not _wait(lock, name, patience):
            return None
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(lock.release)
            lock.sign()
            checksum, flaw = _look(home, name)
            if checksum:
                say(f"using the reference that another run made ({name})")
                return checksum
            if flaw:
                say(f"the reference made earlier cannot be used: {flaw}")
            owned.require(home.parent, [home.name])
            if not home.is_symlink():
                owned.require(home)
            _sweep(home.parent, home.name)
            aside = home.parent / f".{home.name}{_BUILDING}{shared.run_id()}"
            afterwards.callback(owned.discard, aside)
            make(aside)
            return _move(aside, home, name)


def _writing(path: Path, advice: str) -> contextlib.AbstractContextManager[None]:
    return reported(f"{path} cannot be written", OSError, advice=advice)


def _look(home: Path, name: str, *, is_new: bool = False) -> tuple[str, str]:
    """The checksum of a reference that was verified and fits, else empty, and its flaw.

    An absent reference has no flaw, nor has one of another configuration.
    """
    try:
        if meta_as(ReferenceMeta, home, read_meta(home)).fingerprint != name:
            return "", ""
        meta = verify(home)
    except TTraceError as error:
        return "", str(error) if (home / META).exists() else ""
    found = meta_as(ReferenceMeta, home, meta)
    if found.fingerprint != name:
        return "", ""
    if not is_new and (module := fingerprint.changed(found.modules)):
        return "", f"module {module}, or a variable that it reads, has changed since"
    if not is_new and (file := fingerprint.changed_file(found.reads, absent=True)):
        return "", f"{file}, which it has read, has changed since"
    return str(meta[CHECKSUM]), ""


def _wait(lock: Lock, name: str, patience: float) -> bool:
    """Take a lock, after another run has released it; false when that takes too long."""
    until = time.monotonic() + patience
    is_announced = False
    while not lock.acquire():
        if not is_announced:
            say(f"waiting for the reference {name}, which {lock.holder()} is making")
            is_announced = True
        if time.monotonic() > until:
            say(f"waited {patience:.0f} s for it: making a separate copy")
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _sweep(parent: Path, locked: str) -> None:
    """Remove what killed builds left behind; not if locked, but for ``locked``, by this process."""
    for path in filter(cleaning.is_unfinished, parent.iterdir()):
        name = path.name[1:].partition(_BUILDING)[0].partition(_OLD)[0]
        lock = Lock(parent / f".{name}.lock")
        if name == locked or lock.acquire():
            owned.discard(path)
            lock.release()


def _move(aside: Path, home: Path, name: str) -> str:
    """Verify a finished reference and move it to ``home``; returns its checksum.

    An older directory there is moved away, never changed.
    """
    checksum, flaw = _look(aside, name, is_new=True)
    if not checksum:
        raise TTraceError(
            "the reference run ended without a complete trace: "
            + (flaw or f"{aside} holds no trace of this job")
        )
    old = home.with_name(f".{home.name}{_OLD}{shared.run_id()}")
    if home.is_symlink():
        owned.remove(home)
    elif home.exists():
        owned.move(home, old)
    try:
        owned.move(aside, home)
    except OSError:
        # On a file system without locks another process may have been faster.
        checksum, _ = _look(home, name, is_new=True)
        if not checksum:
            raise
    owned.discard(old)
    return checksum


def _link(directory: Path, home: Path) -> None:
    """Make ``directory`` a link to ``home``, if it is ours or absent."""
    with _writing(directory, "choose another --ttrace-dir"):
        target = home.resolve()
        if not (directory.is_symlink() and directory.readlink() == target):
            owned.link(directory, target)
