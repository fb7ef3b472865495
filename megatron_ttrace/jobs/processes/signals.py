# SPDX-License-Identifier: Apache-2.0
"""What Ctrl-C, SIGTERM and SIGHUP do to a command: one line, no process left, exit code 128 + n.

If nothing needs to be cleaned up, the process ends at once. Python's own ``KeyboardInterrupt`` is
not enough there: imports of torch and Megatron catch it, turn it into another error, or print it
from a callback and continue. Inside :func:`orderly` an exception is raised, so that ``finally``
works. The kernel ends ranks with their parent in both cases (``tether``).

This is imported first, so it uses only the standard library.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from megatron_ttrace.jobs.streams import tell

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_SECONDS = 3.0


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(words(number))
        self.number = number

    @property
    def exit_code(self) -> int:
        """As in a shell."""
        return 128 + self.number


class _State:
    """Of this process: the first signal received, and the depth of the contexts below."""

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
    """In a forked child: restore the handlers of a new interpreter."""
    _State.received = _State.orderly = _State.deferred = 0
    for number in (*HANDLED, signal.SIGALRM):
        if signal.getsignal(number) is signal.SIG_IGN:
            continue
        fresh = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, fresh)


def ignore() -> None:
    """In a forked child that ends with its parent, or is ended by it with ``SIGTERM``."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """In here a signal raises :class:`Stopped`; if that has no effect, the process ends soon."""
    _State.orderly += 1
    try:
        yield
    finally:
        _State.orderly -= 1


@contextlib.contextmanager
def abrupt() -> Iterator[None]:
    """In here a signal ends the process at once, even within :func:`orderly`."""
    before, _State.orderly = _State.orderly, 0
    try:
        yield
    finally:
        _State.orderly = before


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """In here nothing is raised; a signal that arrives is raised at the end.

    For the few steps in which a child exists that is not registered yet. The mask also keeps
    signals from a forked child until it has its own handlers.
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
    """Raise ``Stopped`` if a signal was received that has not ended this process yet."""
    if _State.received and not _State.deferred:
        raise Stopped(_State.received)


def take_time(seconds: float) -> None:
    """Once a signal has arrived: what is left to clean up may take so long."""
    if _State.received:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def received() -> int:
    """The number of the first signal received, or 0."""
    return _State.received


def words(number: int) -> str:
    """What a signal did to this process."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def _arrived(number: int, frame: FrameType | None) -> None:
    del frame
    again = _State.received
    _State.received = again or number
    if again or not _State.orderly:
        _leave(_State.received)
    # The exception can get lost in a callback, or in an ``except`` of other code.
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_SECONDS)
    check()


def _too_late(number: int, frame: FrameType | None) -> None:
    del number, frame
    _leave(_State.received or signal.SIGALRM)


def _leave(number: int) -> None:
    tell(f"ttrace: {words(number)}")
    os._exit(128 + number)
