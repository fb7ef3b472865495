# SPDX-License-Identifier: Apache-2.0
"""What a check may use beyond the training's own: memory of a rank, and space on disk."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from megatron_ttrace.errors import TTraceError

DEFAULT_MB = 512
LEAST_MB, MOST_MB = 16, 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Memory of a rank in bytes, divided among those that hold tensors.

    Whoever reaches its part waits: the writer writes, the reader unmaps, the sink reads the sums of
    a device. One tensor that is larger than a part is held anyway.
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


def require_space(directory: Path, needed: int, what: str) -> None:
    """Refuse to write what a file system has no room for.

    Args:
        directory: where it would be written; exists.
        needed: bytes.
        what: is written, for the error.

    Raises:
        TTraceError: when less is free.
    """
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return  # Writing will say what is wrong.
    if free < needed:
        raise TTraceError(
            f"{directory} has {shown(free)} free, {what} needs about {shown(needed)}: choose "
            "another --ttrace-dir, trace fewer iterations, or use a smaller --global-batch-size"
        )


def shown(size: int) -> str:
    """A number of bytes: ``700 MB``, ``1.1 GB``."""
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= length:
            value = size / length
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{size} bytes"
