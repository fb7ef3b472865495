# SPDX-License-Identifier: Apache-2.0
"""What a check may use beyond the training's own: memory of a rank, and space on disk."""

import contextlib
import ctypes
import dataclasses
import shutil
from pathlib import Path

from megatron_ttrace.trace.errors import TTraceError

DEFAULT_MB = 512
LEAST_MB, MOST_MB = 16, 1 << 20

_CONTAINER = Path("/sys/fs/cgroup")
_SMALLER = (
    "choose another --ttrace-dir, trace fewer iterations, or use a smaller --global-batch-size"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Memory of a rank in bytes, divided among those that hold tensors.

    Whoever reaches its part waits: the writer writes, the reader unmaps, the sink reads the sums of
    a device. Copies of the training state that exceed their part are in a file. One tensor that is
    larger than a part is held anyway.
    """

    total: int = DEFAULT_MB << 20

    @property
    def unwritten(self) -> int:
        """Copies that wait to be written. safetensors copies them once more while it writes."""
        return self.total // 8

    @property
    def mapped(self) -> int:
        """Pages of the reference's files that were read."""
        return self.total // 4

    @property
    def staged(self) -> int:
        """Copies on a device that wait for their verdicts."""
        return self.total // 4

    @property
    def kept(self) -> int:
        """Copies of what a traced step changes and what is restored after it."""
        return self.total // 4


def host_room(ranks: int) -> int:
    """Bytes of the host's memory that one of ``ranks`` processes on it may use for copies.

    Half of what is free, for all of them together, in the container if there is one.
    """
    import psutil  # most commands do not need it

    free = int(psutil.virtual_memory().available)
    try:
        most, used = (int((_CONTAINER / f"memory.{x}").read_text()) for x in ("max", "current"))
        free = min(free, max(most - used, 0))
    except (OSError, ValueError):
        pass  # No container, or one without a limit.
    return free // 2 // ranks


def give_back() -> None:
    """Give the memory back that glibc's heap keeps for later, which small blocks pin in parts."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def require_space(directory: Path, needed: int, contents: str, instead: str = _SMALLER) -> None:
    """Refuse to write ``contents`` of so many bytes to a file system without room for them.

    Raises ``TTraceError``, which says what the user can do ``instead``.
    """
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return  # Writing will say what is wrong.
    if free < needed:
        raise TTraceError(
            f"{directory} has {shown(free)} free, {contents} needs about {shown(needed)}: {instead}"
        )


def shown(size: int) -> str:
    """A number of bytes: ``700 MB``, ``1.1 GB``."""
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= length:
            value = size / length
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{size} bytes"
