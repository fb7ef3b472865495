# SPDX-License-Identifier: Apache-2.0
"""The ``--ttrace-dir``: it belongs to one run, and all nodes must see the same one.

A run has an id of 16 hexadecimal digits, which is in each of its files. ``ttrace check`` generates
it and passes it to the ranks in the environment (:data:`VARIABLE`); under ``torchrun`` or Slurm,
rank 0 generates it. All files are recorded
(``trace/owned.py``), and whatever else is in the directory stays. It contains:

- ``.lock``: an exclusive lock of the launcher (or of rank 0), held until it ends. Forked children
  close their copies, so a stray process never blocks the next run.
- ``.ranks``: a lock that all ranks share until they end. If the launcher was killed, ranks may be
  left that still write; the next run waits a few seconds for them, then refuses the directory.
- ``.ttrace-run``: the id, where ranks of other nodes read it.

Functions that take a directory raise ``TTraceError`` when another run uses it, it cannot be
written, or something else in it has one of our names.
"""

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.errors import TTraceError, reported
from megatron_ttrace.trace.locks import Lock

MARK = ".ttrace-run"
LOCK = ".lock"
RANKS = ".ranks"
VARIABLE = "TTRACE_RUN_ID"
_ATTEMPTS, _PAUSE = 20, 0.5
"""Network file systems may show other nodes' files only after some seconds."""
_LEFTOVER = 5.0
"""Seconds to wait for ranks whose launcher is gone. The kernel ends them within milliseconds."""

_ID = re.compile("[0-9a-f]{16}")
SHARES = ".shares-"
"""Begin of the name of a directory of losses' shares, which its run removes."""

REFERENCE = "reference"
LOGS = "logs"
SUMMARY = "summary.json"
_REPORTS = (SUMMARY, "verdicts.jsonl", "collectives.jsonl", "report.html", "junit.xml")
ISOLATED = "isolated"
"""Folder in a run's directory: of a rehearsal with modules isolated, while it is judged."""
REFERENCE_LOGS = "reference-logs"
"""Folder in a run's directory: logs of a reference's ranks, if there are several."""
BATCHES = "batches"
"""Folder in a run's directory: microbatches that its reference is given."""
_TRACES = ("candidate", "start", "states", ISOLATED, BATCHES)
_OF_LOGS = (
    *("reference.log", "replay.log", "layout.log", LOGS, REFERENCE_LOGS),
    *("reference.end.json", "replay.end.json", "layout.end.json"),
    *("reference.wait.json", "replay.wait.json", "layout.wait.json"),
)
NAMES = (*_REPORTS, *_TRACES, *_OF_LOGS, MARK, REFERENCE)
"""What a run writes into its directory, and removes from it before."""
_TEMPORARY = re.compile(rf"\.({'|'.join(map(re.escape, (*_REPORTS, MARK)))})\.[0-9a-f]{{16}}")

_run = ""
_held: dict[Path, list[Lock]] = {}
"""Locks of this process, by directory."""


def _forget() -> None:
    global _run
    _run = ""
    _held.clear()


# A rank that is forked learns its run from its own environment.
os.register_at_fork(after_in_child=_forget)


def run_id() -> str:
    """The id of the run that this process belongs to, 16 hexadecimal digits."""
    global _run
    _run = _run or _named() or secrets.token_hex(8)
    return _run


def _named() -> str:
    """The id that a launcher left in the environment; empty without one."""
    named = os.environ.get(VARIABLE, "")
    return named if _ID.fullmatch(named) else ""


class Claim:
    """A directory that is held for one run, or command; a context manager that gives it back."""

    def __init__(
        self, directory: Path, run: str, names: Sequence[str], clean: Callable[[Path], None]
    ) -> None:
        with _writing(directory):
            self.run = run
            self.lock = _lock_of_ours(directory, names)
            try:
                self.lock.sign()
                clean(directory)
            except BaseException:
                self.lock.release()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the next run have the directory."""
        self.lock.release()


def claim(directory: Path) -> Claim:
    """Take a directory for a new run; of an earlier run in it, only the reference is left."""
    run = secrets.token_hex(8)

    def clean(directory: Path) -> None:
        _await_ranks(directory)
        _remove_reports(directory)
        for name in _OF_LOGS:
            owned.remove(directory / name)
        for folder in directory.glob(f"{SHARES}*"):
            owned.discard(folder)
        remove_traces(directory)
        owned.compact(directory)
        owned.write(directory / MARK, [run])

    return Claim(directory, run, NAMES, clean)


def require_free(directory: Path) -> None:
    """Refuse a directory that cannot be taken, before anything slow is done."""
    with _writing(directory):
        _lock_of_ours(directory, NAMES).release()


def alone(directory: Path, names: Sequence[str] = ()) -> Claim:
    """Hold the directory of a command that runs several checks below it, under other ``names``.

    No second command gets it: what one keeps there, the other would replace.
    """
    return Claim(directory, "", names, lambda _: None)


def claim_report(directory: Path, run: str, *, keeps: bool = False) -> Claim:
    """Take a directory to write a report of saved traces into it.

    ``run`` is the id of the run that saved the candidate. An old report is removed, unless it
    ``keeps`` it to write parts of it again.
    """

    def clean(directory: Path) -> None:
        if not keeps:
            _remove_reports(directory)

    return Claim(directory, run, _REPORTS, clean)


def _lock_of_ours(directory: Path, names: Sequence[str]) -> Lock:
    """The lock on a directory in which nothing else has one of our names; it is made if missing."""
    if not os.path.lexists(directory / LOCK):
        # Before the lock's file is left in a directory that is refused.
        owned.require(directory, names)
    owned.make(directory, ignored=True)
    lock = Lock(directory / LOCK)
    if not lock.acquire():
        raise TTraceError(
            f"{directory} is in use by another check ({lock.holder()}): "
            "choose another directory, or wait for it"
        )
    try:
        owned.require(directory, names)
    except BaseException:
        lock.release()
        raise
    if not lock.supported:
        print(
            f"ttrace: the file system of {directory} has no locks: "
            "run only one check in it at a time",
            flush=True,
        )
    return lock


def _writing(directory: Path) -> contextlib.AbstractContextManager[None]:
    return reported(f"{directory} is not writable", OSError, advice="choose another directory")


def _await_ranks(directory: Path) -> None:
    ranks = Lock(directory / RANKS)
    until = time.monotonic() + _LEFTOVER
    while not ranks.acquire():
        if time.monotonic() > until:
            raise TTraceError(
                f"--ttrace-dir {directory} is in use by ranks of an earlier run: "
                "choose another directory, or end them"
            )
        time.sleep(0.05)
    ranks.release()


def remove_traces(directory: Path) -> None:
    """Remove the candidate's tensors, and the state that it started from. Raises ``OSError``."""
    for name in _TRACES:
        owned.remove(directory / name)


def _remove_reports(directory: Path) -> None:
    """Remove the report of an earlier run, half-written files too. Raises ``OSError``."""
    for name in _REPORTS:
        owned.remove(directory / name)
    owned.remove_files(directory, lambda name: _TEMPORARY.fullmatch(name) is not None)


def prepare(directory: Path) -> str:
    """On rank 0: claim the directory unless the launcher has done so; returns the run's id.

    One that is no longer what the launcher claimed is refused.
    """
    for lock in _held.pop(directory.resolve(), []):
        lock.release()
    named = _named()
    if named and _marked(directory) == named:
        run = named
    else:
        own = claim(directory)
        if named:
            own.release()
            raise TTraceError(
                f"--ttrace-dir {directory} was removed or replaced after the check had begun: run "
                f"it again (if no ttrace check started this run, unset {VARIABLE})"
            )
        run = own.run
        _held[directory.resolve()] = [own.lock]
    _join(directory, run)
    return run


def require(directory: Path, mark: str) -> None:
    """Check that this rank sees the directory that rank 0 prepared, and join its run.

    Raises ``TTraceError`` when it does not: the reference would be missing here.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE)
        if _marked(directory) == mark:
            _join(directory, mark)
            return
    raise TTraceError(
        f"--ttrace-dir {directory} on {socket.gethostname()} is not the directory that rank 0 "
        "writes to: choose a directory that all nodes share"
    )


def _marked(directory: Path) -> str:
    try:
        return codec.read(directory / MARK, 64).decode(errors="replace")
    except (OSError, codec.CodecError):
        return ""


def _join(directory: Path, run: str) -> None:
    """Join a run: take its id and a share of the ranks' lock."""
    global _run
    _run = run
    held = _held.setdefault(directory.resolve(), [])
    if any(lock.path.name == RANKS for lock in held):
        return
    lock = Lock(directory / RANKS)
    with _writing(directory):
        # A process that claims the directory holds this lock for a moment.
        for _ in range(100):
            if lock.acquire(shared=True):
                held.append(lock)
                return
            time.sleep(0.01)
    raise TTraceError(f"--ttrace-dir {directory} is being taken by another check: choose another")
