# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors that a traced step changes: in memory while there is room, else in a file.

The file has no name, so it is gone when its process is, however that ends. It is written from
begin to end, and read in pieces: what is not in memory never is there as a whole.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import IO

import torch

from megatron_ttrace.trace.budget import require_space
from megatron_ttrace.trace.staging import to_device, to_host
from megatron_ttrace.trace.views import as_bytes, memory

_PIECE = 8 << 20
_PLAIN = (torch.Tensor,)
"""Classes of tensors that are nothing but their bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A copy of one tensor.

    Attributes:
        data: the copy; if there is a ``file``, an empty tensor of its shape on the device "meta".
        device: of the tensor that was copied.
        file: has the copy's bytes from ``start`` on; ``None`` if it is in memory.
    """

    data: torch.Tensor
    device: torch.device
    file: IO[bytes] | None = None
    start: int = 0

    def put(self, target: torch.Tensor) -> None:
        """Write the values into ``target``, bit for bit in their dtype. Raises ``OSError``."""
        target, form = target.detach(), (self.data.shape, self.data.dtype)
        if self.file is None:
            target.copy_(self.data)
        elif target.is_contiguous() and (target.shape, target.dtype) == form:
            self._read(self.file, target)
        else:
            target.copy_(self.get())

    def get(self) -> torch.Tensor:
        """The values on the device of the tensor that was copied; not to be changed."""
        if self.file is None:
            return to_device(self.data, self.device)
        made = torch.empty(self.data.shape, dtype=self.data.dtype, device=self.device)
        self._read(self.file, made)
        return made

    def _read(self, file: IO[bytes], target: torch.Tensor) -> None:
        at = self.start
        for piece in as_bytes(target).split(_PIECE):
            host = torch.empty(len(piece), dtype=torch.uint8)
            direct = piece.device.type == "cpu"
            view = memory(piece if direct else host)
            while view:
                read = os.preadv(file.fileno(), [view], at)
                if not read:
                    raise OSError("a file with copies of the training state ends too early")
                view, at = view[read:], at + read
            if not direct:
                piece.copy_(host)


class Copies:
    """Makes copies. A context manager; afterwards those in a file are gone.

    Attributes:
        room: bytes that may still be copied in the memory of the tensors' own device.
        host_room: bytes of tensors on other devices that may still be copied to the host's memory.
    """

    def __init__(
        self,
        room: int = sys.maxsize,
        host_room: int = 0,
        directory: Path = Path(),
        ranks: int = 1,
    ) -> None:
        """``ranks`` processes write such files to the file system of ``directory``."""
        self.room = room
        self.host_room = host_room
        self._directory = directory
        self._ranks = ranks
        self._file: IO[bytes] | None = None
        self._end = 0

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def others(self) -> Copies:
        """Copies that are needed for a shorter time, in the room that is left."""
        return Copies(self.room, self.host_room, self._directory, self._ranks)

    def require_space(self, device: torch.device, size: int) -> None:
        """Refuse copies of so many bytes for which the disk has no room. Raises ``TTraceError``."""
        left = size - self.room - (0 if device.type == "cpu" else self.host_room)
        if left > 0:
            require_space(
                self._directory,
                left * self._ranks,
                "the training state of all ranks during a traced step",
                "choose another --ttrace-dir, or a larger --ttrace-memory-mb",
            )

    def copy(self, tensor: torch.Tensor) -> Copy:
        """Copy a tensor; one of a class of its own stays in memory. Raises ``OSError``."""
        data, size = tensor.detach(), tensor.nbytes
        device = data.device
        if type(data) not in _PLAIN or size <= self.room:
            self.room -= size
            return Copy(data.clone(), device)
        if device.type != "cpu" and size <= self.host_room:
            self.host_room -= size
            return Copy(to_host(data), device)
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._directory)  # noqa: SIM115
        start = self._end
        for piece in as_bytes(data.contiguous()).split(_PIECE):
            host = piece.cpu()
            view = memory(host)
            while view:
                written = os.pwrite(self._file.fileno(), view, self._end)
                view, self._end = view[written:], self._end + written
        shape = torch.empty(data.shape, dtype=data.dtype, device="meta")
        return Copy(shape, device, self._file, start)
