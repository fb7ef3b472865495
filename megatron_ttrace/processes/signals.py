# SPDX-License-Identifier: Apache-2.0
"""What Ctrl-C, SIGTERM and SIGHUP do to a command: one line, no process left, exit code 128 + n.

Where nothing needs to be put in order the process ends at once. Python's own ``KeyboardInterrupt``
is not enough there: imports of torch and Megatron catch it, turn it into another error, or print it
from a callback and go on. Inside :func:`orderly` an exception is raised, so that ``finally`` works.
Ranks need no care of ours either way: the kernel ends them with their parent (``tether``).

Imported before anything else: only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from megatron_ttrace.streams import tell

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_SECONDS = 3.0
_WORDS = {signal.SIGINT: "interrupted"}


class Stopped(KeyboardInterrupt):
    """Somebody wants this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(words(number))
        self.number = number

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return 128 + self.number


class _State:
    """Of this process: what came, and how far we are."""

    received = 0
    orderly = 0
    deferred = 0


def install() -> None:
    """Handle the signals that this process does not ignore (``nohup`` ignores SIGHUP)."""
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _arrived)
    signal.signal(signal.SIGALRM, _too_late)


def reset() -> None:
    """In a forked child: what a fresh interpreter has."""
    _State.received = _State.orderly = _State.deferred = 0
    for number in (*HANDLED, signal.SIGALRM):
        if signal.getsignal(number) is signal.SIG_IGN:
            continue
        fresh = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, fresh)


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """Raise :class:`Stopped` in here, and leave at once when that has no effect within seconds."""
    _State.orderly += 1
    try:
        yield
    finally:
        _State.orderly -= 1


@contextlib.contextmanager
def abrupt() -> Iterator[None]:
    """Leave at once in here, although the code around it is :func:`orderly`."""
    before, _State.orderly = _State.orderly, 0
    try:
        yield
    finally:
        _State.orderly = before


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Nothing is raised in here; what came is raised at the end.

    For the few steps in which a child exists that nobody has written down yet. The mask keeps a
    signal from a forked child until that has handlers of its own.
    """
    _State.deferred += 1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        _State.deferred -= 1
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    check()


def check() -> None:
    """Raise what was received and has not ended this process yet.

    Raises:
        Stopped: when there is something.
    """
    if _State.received and not _State.deferred:
        raise Stopped(_State.received)


def received() -> int:
    """The number of the signal that came, or 0."""
    return _State.received


def words(number: int) -> str:
    """What a signal did to us."""
    return _WORDS.get(signal.Signals(number), f"ended by {signal.Signals(number).name}")


def _arrived(number: int, frame: FrameType | None) -> None:
    del frame
    again = _State.received
    _State.received = again or number
    if again or not _State.orderly:
        _leave(_State.received)
    # The exception can get lost in a callback, or in an ``except`` of somebody else.
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_SECONDS)
    check()


def _too_late(number: int, frame: FrameType | None) -> None:
    del number, frame
    _leave(_State.received or signal.SIGALRM)


def _leave(number: int) -> None:
    tell(f"ttrace: {words(number)}")
    os._exit(128 + number)
