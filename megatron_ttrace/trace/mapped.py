# SPDX-License-Identifier: Apache-2.0
"""The tensors of a safetensors file, backed by the file.

safetensors makes one tensor after the other, each in 20 microseconds or, between others' work, in
twice that: a traced step asks for a thousand. But it also has all that is needed to make them at
once from one mapping of the file: their names in the order of their data, which has no gaps and
ends with the file, their shapes and their dtypes.
"""

import ctypes
import errno
import functools
import math
import mmap
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import safe_open

from megatron_ttrace.trace import compiled
from megatron_ttrace.trace.errors import TTraceError

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


class _State:
    survives = False


@functools.cache
def _library() -> ctypes.CDLL | None:
    loaded = compiled.load("trace.mapped")
    if loaded is not None:
        loaded.ttrace_watch.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    return loaded


def survive() -> bool:
    """From now on this process survives when a mapped file is truncated while it is read.

    It reads zeros then, so it has to call :func:`require_whole` before it uses a result. Returns
    whether it does: not without the compiled file, or when SIGBUS has another handler.
    """
    library = _library()
    _State.survives = library is not None and bool(library.ttrace_guard())
    return _State.survives


def require_whole() -> None:
    """Raises ``TTraceError`` when zeros were read instead of a file."""
    library = _library()
    if library is not None and library.ttrace_faults():
        raise TTraceError("a file of the reference was truncated while it was read: run it again")


class _Mapping(mmap.mmap):
    """The bytes of a file; what this process changes of them stays its own."""

    _number = -1

    @classmethod
    def of(cls, path: Path, size: int) -> Self:
        with path.open("rb") as file:
            mapping = cls(file.fileno(), size, access=mmap.ACCESS_COPY)
        library = _library()
        if library is not None and _State.survives:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            mapping._number = library.ttrace_watch(address, size)
        return mapping

    def __del__(self) -> None:
        library = _library()
        if library is not None and self._number >= 0:
            library.ttrace_forget(self._number)


class MappedFile:
    """An open file; it stays mapped as long as one of its tensors lives."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises what safetensors raises at one that is damaged, or ``OSError``."""
        with safe_open(path, framework="pt") as opened, path.open("rb") as file:
            # The data begin after the header, whose length is in the first eight bytes.
            size, start = path.stat().st_size, 8 + int.from_bytes(file.read(8), "little")
            self._places = _places(opened, start, size)
            others = () if self._places else opened.offset_keys()
            self._tensors = {name: opened.get_tensor(name) for name in others}
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}
        self._mapping = _Mapping.of(path, size) if self._places else None
        if self._mapping is not None:
            self._by_dtype[torch.uint8] = torch.frombuffer(self._mapping, dtype=torch.uint8)

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return [*self._places, *self._tensors]

    def get(self, name: str) -> torch.Tensor | None:
        """One of them.

        Raises ``ValueError`` when the file has become shorter: reading it would end the process.
        """
        if self._mapping is not None and (left := self._mapping.size()) < len(self._mapping):
            raise ValueError(f"truncated to {left} of {len(self._mapping)} bytes while it is read")
        place = self._places.pop(name, None)
        if place is not None:
            strides = [math.prod(place.shape[dim:]) for dim in range(1, len(place.shape) + 1)]
            offset = place.start // place.dtype.itemsize
            elements = self._elements(place.dtype)
            self._tensors[name] = elements.as_strided(place.shape, strides, offset)
        return self._tensors.get(name)

    def release(self) -> bool:
        """Give back the memory of the pages that were read; false if this file is not mapped.

        Its tensors stay: a page that is used again is read again.
        """
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
        return self._mapping is not None

    def _elements(self, dtype: torch.dtype) -> torch.Tensor:
        """The file's bytes as elements of a dtype."""
        if dtype not in self._by_dtype:
            data, size = self._by_dtype[torch.uint8], dtype.itemsize
            self._by_dtype[dtype] = data[: len(data) // size * size].view(dtype)
        return self._by_dtype[dtype]


def _places(opened: Any, at: int, end: int) -> dict[str, _Place]:
    """Where a file's tensors are between two bytes of it; nothing if one has another dtype."""
    places = {}
    for name in opened.offset_keys():
        stored = opened.get_slice(name)
        dtype, shape = _DTYPES.get(stored.get_dtype()), stored.get_shape()
        if dtype is None or at % dtype.itemsize:
            return {}
        places[name] = _Place(dtype, shape, at)
        at += math.prod(shape) * dtype.itemsize
    return places if at == end else {}


def lacks_memory(path: Path) -> bool:
    """Whether there is no memory to map a file. What maps traces only says so in words."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            return False
    except (OSError, ValueError) as error:
        return isinstance(error, OSError) and error.errno == errno.ENOMEM
