# SPDX-License-Identifier: Apache-2.0
"""The tensors of a safetensors file, backed by the file.

safetensors makes one tensor after the other, each in 20 microseconds or, between others' work, in
twice that: a traced step asks for a thousand. It also says all that is needed to make them at once
from one mapping of the file: their names in the order of their data, which has no gaps and ends
with the file, their shapes and their dtypes.
"""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Names in the format's header (safetensors' README, "Format")."""


class _Place(NamedTuple):
    dtype: torch.dtype
    shape: list[int]
    start: int


class MappedFile:
    """An open file; it stays mapped as long as one of its tensors lives."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises what safetensors raises at one that is damaged, or ``OSError``."""
        with safe_open(path, framework="pt") as opened:
            size, start = path.stat().st_size, _start(path)
            self._places = _places(opened, start, size)
            rest = () if self._places else opened.offset_keys()
            self._tensors = {name: opened.get_tensor(name) for name in rest}
        self._whole: dict[torch.dtype, torch.Tensor] = {}
        self._size, self._file = size, -1
        if self._places:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            self._whole[torch.uint8] = torch.from_file(str(path), size=size, dtype=torch.uint8)

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return [*self._places, *self._tensors]

    def get(self, name: str) -> torch.Tensor | None:
        """One of them.

        Raises:
            ValueError: when the file has become shorter: reading its mapping would end the process.
        """
        if self._file >= 0 and (there := os.fstat(self._file).st_size) < self._size:
            raise ValueError(f"truncated to {there} of {self._size} bytes while it is read")
        place = self._places.pop(name, None)
        if place is not None:
            whole = self._as(place.dtype)
            strides = [math.prod(place.shape[dim:]) for dim in range(1, len(place.shape) + 1)]
            offset = place.start // place.dtype.itemsize
            self._tensors[name] = whole.as_strided(place.shape, strides, offset)
        return self._tensors.get(name)

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """The file's bytes as elements of a dtype."""
        if dtype not in self._whole:
            whole = self._whole[torch.uint8]
            self._whole[dtype] = whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
        return self._whole[dtype]


def _start(path: Path) -> int:
    """Where the data begin: after the header, whose length is in the file's first eight bytes."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _places(opened: Any, at: int, end: int) -> dict[str, _Place]:
    """Where a file's tensors are between two bytes of it; nothing if one has another dtype."""
    found = {}
    for name in opened.offset_keys():
        stored = opened.get_slice(name)
        dtype, shape = _DTYPES.get(stored.get_dtype()), stored.get_shape()
        if dtype is None or at % dtype.itemsize:
            return {}
        found[name] = _Place(dtype, shape, at)
        at += math.prod(shape) * dtype.itemsize
    return found if at == end else {}
