# SPDX-License-Identifier: Apache-2.0
"""Index lines: the description of each tensor of a trace, and its validation."""

import dataclasses
import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Self

import torch

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import AXES
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import LISTED, Bounds, CodecError, Count
from megatron_ttrace.trace.errors import TTraceError, brief
from megatron_ttrace.trace.records import TraceKey

_MAX_DIMS = 64
_MAX_SUMS = 256

INDEX_FILE = re.compile(r"rank-(\d{5,9})\.index\.jsonl")
DATA_FILE = re.compile(r"rank-\d{5,9}\.\d{4,9}\.safetensors")

_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One index line: a tensor of a trace.

    Attributes:
        shape: of what is stored.
        file: with the data; empty if there is none.
        tensor: name of the data in the file.
        same_as: number of the line that this one repeats, or -1; once read, ``file`` and ``tensor``
            are that line's.
        logical_shape: of the whole tensor; in a reference, the same as ``shape``.
        placement: in words.
        boxes: which stored elements are which logical ones.
        factor: what this run's values must be divided by to be the reference's.
        misfit: why the tensor has no place in the reference, if it has none.
        sums: what was measured of a tensor that is not judged by its elements; it has no data.
        partial_over: the mesh axis over which it is partial, if any.
    """

    key: Annotated[TraceKey, LISTED]
    shape: tuple[Count, ...]
    dtype: str
    file: str = ""
    tensor: str = ""
    same_as: Annotated[int, Bounds(-1, (1 << 63) - 1)] = -1
    logical_shape: tuple[Count, ...] = ()
    placement: str = "Replicate"
    boxes: tuple[Annotated[Box, LISTED], ...] = ()
    factor: float = 1.0
    misfit: str = ""
    sums: tuple[Any, ...] = ()
    partial_over: str = ""

    @classmethod
    def of(cls, key: TraceKey, data: torch.Tensor, **more: Any) -> Self:
        """The line of a tensor that is stored as it is."""
        return cls(key, tuple(data.shape), str(data.dtype).removeprefix("torch."), **more)

    def contradiction(self) -> str:
        """Why no tensor is like this; empty if one can be."""
        if self.dtype not in _DTYPES:
            return f"dtype: {self.dtype[:40]!r} is not a dtype"
        if max(len(self.shape), len(self.logical_shape)) > _MAX_DIMS:
            return f"shape: more than {_MAX_DIMS} dims"
        if not math.isfinite(self.factor) or not self.factor:
            return f"factor: {self.factor} is not a ratio"
        if self.partial_over and self.partial_over not in AXES:
            return "partial_over: not an axis"
        if len(self.sums) > _MAX_SUMS or any(type(x) not in (int, float, str) for x in self.sums):
            return f"sums: not a list of at most {_MAX_SUMS} numbers"
        return ""


def encode(entry: Entry) -> str:
    """An entry as a line of JSON, without the end of line."""
    key = dataclasses.astuple(entry.key)
    line: dict[str, Any] = {"key": key, "shape": entry.shape, "dtype": entry.dtype}
    if entry.same_as >= 0:
        line["same_as"] = entry.same_as
    elif entry.file or entry.tensor:
        line |= {"file": entry.file, "tensor": entry.tensor}
    for name in ("misfit", "sums", "partial_over"):
        if value := getattr(entry, name):
            line[name] = value
    if entry.boxes or entry.logical_shape:
        line |= {
            "logical_shape": entry.logical_shape,
            "placement": entry.placement,
            "boxes": [[box.logical, box.extent, box.local] for box in entry.boxes],
            "factor": entry.factor,
        }
    return json.dumps(line)


def decode(line: Any) -> Entry:
    """The inverse of :func:`encode`. Raises ``CodecError``."""
    entry = codec.decode(Entry, line)
    is_whole = "logical_shape" not in line
    return dataclasses.replace(entry, logical_shape=entry.shape) if is_whole else entry


def validate(entry: Entry, before: list[Entry], files: Collection[str] | None) -> None:
    """Check an entry against the lines before it and the files that ``meta.json`` lists.

    ``files`` is ``None`` for a trace that is still being written.

    Raises ``CodecError`` when it repeats a line without data, names a file that is not part of the
    trace, or has a box outside its tensor.
    """
    stored: tuple[int, ...] | None = None
    if entry.same_as >= 0:
        if entry.same_as >= len(before):
            raise CodecError(f"repeats line {entry.same_as}, which does not precede it")
        source = before[entry.same_as]
        if source.same_as >= 0 or not source.file:
            raise CodecError(f"repeats line {entry.same_as}, which has no data")
        if source.dtype != entry.dtype or math.prod(source.shape) != math.prod(entry.shape):
            raise CodecError(f"repeats line {entry.same_as}, which is another tensor")
        stored = source.shape
    elif entry.file or entry.tensor:
        if not DATA_FILE.fullmatch(entry.file) or (files is not None and entry.file not in files):
            raise CodecError("'file' is not a file of this trace")
        stored = entry.shape
    elif not entry.sums:
        raise CodecError("it has no data")
    for number, box in enumerate(entry.boxes):
        if not _is_inside(box.logical, box.extent, entry.logical_shape):
            raise CodecError("lies outside the whole tensor", f"boxes[{number}]")
        if stored is None:
            continue
        flat = (box.numel,), (math.prod(stored),)
        if not _is_inside(box.local, *(flat if box.is_flat else (box.extent, stored))):
            raise CodecError("lies outside the stored tensor", f"boxes[{number}]")


def _is_inside(starts: tuple[int, ...], sizes: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(starts) == len(sizes) == len(whole) and all(
        start >= 0 <= size and start + size <= end
        for start, size, end in zip(starts, sizes, whole, strict=True)
    )


def read_index(path: Path, files: Collection[str] | None = None) -> list[Entry]:
    """All entries of an index file; ``files`` as of :func:`validate`.

    Raises ``TTraceError``, which names the damaged line.
    """
    entries: list[Entry] = []
    try:
        for line in codec.lines(path, json.loads):
            entry = decode(line)
            validate(entry, entries, files)
            if entry.same_as >= 0:
                source = entries[entry.same_as]
                entry = dataclasses.replace(entry, file=source.file, tensor=source.tensor)
            entries.append(entry)
    except (OSError, ValueError, RecursionError) as error:
        raise TTraceError(
            f"{path}:{len(entries) + 1} is damaged ({brief(error)}): run the traced job again"
        ) from error
    return entries
