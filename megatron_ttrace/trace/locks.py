# SPDX-License-Identifier: Apache-2.0
"""Locks that the kernel releases however their holder dies.

``flock`` belongs to an open file description, which a forked child shares. A child closes its copy,
so that it cannot keep the lock after the holder's end. Programs that are started do not inherit it.
filelock has no shared locks of this kind, and its children keep the lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.sanitise import clean

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_NOTE_LIMIT = 4096
_ATTEMPTS = 10

_open: set[int] = set()


def _close_in_child() -> None:
    # Closing a copy releases nothing as long as the holder has its own.
    for handle in _open:
        with contextlib.suppress(OSError):
            os.close(handle)
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Lock:
    """An advisory lock on a file, which is created if missing, and never removed.

    ``supported`` is false after :meth:`acquire` if the file system has no locks; every process then
    gets the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.supported = True
        self._handle: int | None = None
        self._owner = 0

    def acquire(self, *, shared: bool = False) -> bool:
        """Take the lock if it is free; returns whether it is held now. Raises ``OSError``."""
        handle = self._opened()
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(handle)
                raise
            self.supported = False
        self._handle, self._owner = handle, os.getpid()
        _open.add(handle)
        return True

    def _opened(self) -> int:
        # A FIFO that nobody reads would make an open for writing alone fail, or wait.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                return os.open(self.path, flags)
            # Another process may create it at the same time.
            with contextlib.suppress(owned.ForeignError):
                return owned.create(self.path, replace=False)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self.path))

    def sign(self) -> None:
        """Write into the file who holds the lock. Raises ``OSError``, e.g. on a full disk.

        A lock of another program, or with another name (a hard link), is only locked.
        """
        assert self._handle is not None
        if not owned.is_ours(self.path) or os.fstat(self._handle).st_nlink != 1:
            return
        note = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        text = json.dumps(note).encode()
        # As long as the largest, so that nothing of an older note is left.
        os.pwrite(self._handle, text.ljust(_NOTE_LIMIT // 8), 0)
        os.fsync(self._handle)

    def holder(self) -> str:
        """Who holds the lock, in words, if the holder has signed."""
        try:
            note = codec.parse(codec.read(self.path, _NOTE_LIMIT))
            pid, host, date = int(note["pid"]), str(note["host"]), str(note["date"])
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"
        return f"process {pid} on {clean(host, 80)} since {clean(date, 40)}"

    def release(self) -> None:
        """Give the lock back, if this process holds it."""
        handle, self._handle = self._handle, None
        if handle is not None and self._owner == os.getpid() and handle in _open:
            _open.discard(handle)
            os.close(handle)
