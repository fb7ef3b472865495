# SPDX-License-Identifier: Apache-2.0
"""Index lines: what a trace says of each tensor, and the check that it makes sense."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import AXES
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey

MAX_LINE = 16 << 20
"""Bytes of an index line. The longest real ones hold some thousand boxes."""
_MAX_DIMS = 64
_MAX_SUMS = 256
_MAX_INT = 2**62

INDEX_FILE = re.compile(r"rank-(\d{5,9})\.index\.jsonl")
DATA_FILE = re.compile(r"rank-\d{5,9}\.\d{4,9}\.safetensors")

_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One index line: a tensor of a trace.

    ``shape`` is the stored shape, ``logical_shape`` the whole tensor's (the same in a reference).
    ``placement`` is in words; ``partial_over`` is the mesh axis over which it is partial, if
    any. ``factor`` is what this run's values must be divided by to be the reference's.
    ``misfit`` says why the tensor has no place in the reference, if it has none. ``sums`` is what
    was found of a tensor that was judged by other means than its elements: no data is kept of it.
    """

    key: TraceKey
    shape: tuple[int, ...]
    dtype: str
    file: str = ""
    tensor: str = ""
    same_as: int = -1
    logical_shape: tuple[int, ...] = ()
    placement: str = "Replicate"
    boxes: tuple[Box, ...] = ()
    factor: float = 1.0
    misfit: str = ""
    sums: tuple[float | int | str, ...] = ()
    partial_over: str = ""


def encode(entry: Entry) -> str:
    """An entry as a line of JSON, without the end of line."""
    key = entry.key
    line: dict[str, Any] = {
        "key": [key.iteration, key.microbatch, key.kind.value, key.name, key.index],
        "shape": entry.shape,
        "dtype": entry.dtype,
    }
    if entry.same_as >= 0:
        line["same_as"] = entry.same_as
    elif entry.file or entry.tensor:
        line |= {"file": entry.file, "tensor": entry.tensor}
    if entry.misfit:
        line["misfit"] = entry.misfit
    if entry.sums:
        line["sums"] = entry.sums
    if entry.partial_over:
        line["partial_over"] = entry.partial_over
    if entry.boxes or entry.logical_shape:
        line |= {
            "logical_shape": entry.logical_shape,
            "placement": entry.placement,
            "boxes": [[box.logical, box.extent, box.local] for box in entry.boxes],
            "factor": entry.factor,
        }
    return json.dumps(line)


def decode(line: Any) -> Entry:
    """The inverse of :func:`encode`.

    Raises:
        ValueError: when a field is missing, or of another type or out of its range.
    """
    if not isinstance(line, dict):
        raise ValueError("not an object")
    key = line.get("key")
    if not isinstance(key, list) or len(key) != 5:
        raise ValueError("'key' is not a list of 5")
    iteration, microbatch, kind, name, index = key
    if not isinstance(kind, str):
        raise ValueError("the kind is not a string")
    shape = _sizes(line.get("shape"), "shape")
    dtype = _text(line.get("dtype"), "dtype")
    if dtype not in _DTYPES:
        raise ValueError(f"{dtype[:40]!r} is not a dtype")
    boxes = line.get("boxes", [])
    if not isinstance(boxes, list):
        raise ValueError("'boxes' is not a list")
    factor = line.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise ValueError("'factor' is not a number")
    factor = float(factor) if abs(factor) < _MAX_INT or isinstance(factor, float) else math.inf
    if not math.isfinite(factor) or factor == 0.0:
        raise ValueError(f"'factor' is {factor}")
    return Entry(
        key=TraceKey(
            _integer(iteration, "the iteration"),
            _integer(microbatch, "the microbatch", least=STEP_LEVEL),
            Kind(kind),
            _text(name, "the name"),
            _integer(index, "the index"),
        ),
        shape=shape,
        dtype=dtype,
        file=_text(line.get("file", ""), "file"),
        tensor=_text(line.get("tensor", ""), "tensor"),
        same_as=_integer(line.get("same_as", -1), "same_as", least=-1),
        logical_shape=_sizes(line["logical_shape"], "logical_shape")
        if "logical_shape" in line
        else shape,
        placement=_text(line.get("placement", "Replicate"), "placement"),
        boxes=tuple(_box(box) for box in boxes),
        factor=factor,
        misfit=_text(line.get("misfit", ""), "misfit"),
        sums=_sums(line.get("sums", [])),
        partial_over=_axis(line.get("partial_over", "")),
    )


def _integer(value: Any, what: str, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _MAX_INT:
        raise ValueError(f"{what} is not an integer of at least {least}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a string")
    return value


def _axis(value: Any) -> str:
    if value and value not in AXES:
        raise ValueError("'partial_over' is not an axis")
    return _text(value, "partial_over")


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        raise ValueError(f"{what} is not a list of at most {_MAX_DIMS} integers")
    return tuple(_integer(size, f"an entry of {what}") for size in value)


def _box(value: Any) -> Box:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("a box is not a list of 3")
    logical, extent, local = value
    return Box(_sizes(logical, "a box"), _sizes(extent, "a box"), _sizes(local, "a box"))


def _sums(value: Any) -> tuple[float | int | str, ...]:
    if not isinstance(value, list) or len(value) > _MAX_SUMS:
        raise ValueError(f"'sums' is not a list of at most {_MAX_SUMS} numbers")
    if not all(type(item) in (int, float, str) for item in value):
        raise ValueError("'sums' contains a value that is not a number")
    return tuple(value)


def validate(entry: Entry, before: list[Entry], files: Collection[str] | None) -> None:
    """Check an entry against the lines that precede it and the files of the trace.

    Args:
        entry: the line.
        before: the entries of the lines that precede it.
        files: names that ``meta.json`` lists; ``None`` for a trace that is still being written.

    Raises:
        ValueError: when it repeats a line without data, names a file that is not part of the
            trace, or has a box outside its tensor.
    """
    stored: tuple[int, ...] | None = None
    if entry.same_as >= 0:
        if entry.same_as >= len(before):
            raise ValueError(f"repeats line {entry.same_as}, which does not precede it")
        source = before[entry.same_as]
        if source.same_as >= 0 or not source.file:
            raise ValueError(f"repeats line {entry.same_as}, which has no data")
        if source.dtype != entry.dtype or math.prod(source.shape) != math.prod(entry.shape):
            raise ValueError(f"repeats line {entry.same_as}, which is another tensor")
        stored = source.shape
    elif entry.file or entry.tensor:
        if not DATA_FILE.fullmatch(entry.file) or (files is not None and entry.file not in files):
            raise ValueError("'file' is not a file of this trace")
        stored = entry.shape
    elif not entry.sums:
        raise ValueError("there is no data of it")
    for box in entry.boxes:
        _check_box(box, entry.logical_shape, stored)


def _check_box(box: Box, whole: tuple[int, ...], local: tuple[int, ...] | None) -> None:
    if len(box.logical) != len(whole) or len(box.extent) != len(whole):
        raise ValueError("a box has another number of dims than its tensor")
    if not _is_inside(box.logical, box.extent, whole):
        raise ValueError("a box lies outside the whole tensor")
    if local is None:
        return
    if box.is_flat:
        fits = len(box.local) == 1 and _is_inside(box.local, (box.numel,), (math.prod(local),))
    else:
        fits = len(local) == len(box.local) and _is_inside(box.local, box.extent, local)
    if not fits:
        raise ValueError("a box lies outside the stored tensor")


def _is_inside(starts: tuple[int, ...], sizes: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return all(start + size <= end for start, size, end in zip(starts, sizes, whole, strict=True))


def read_index(path: Path, files: Collection[str] | None = None) -> list[Entry]:
    """All entries of an index file; ``files`` as of :func:`validate`.

    Raises:
        TTraceError: when a line is damaged; it is named.
    """
    entries: list[Entry] = []
    try:
        with path.open("rb") as lines:
            while text := lines.readline(MAX_LINE + 1):
                if len(text) > MAX_LINE:
                    raise ValueError(f"longer than {MAX_LINE} bytes")
                entry = decode(json.loads(text))
                validate(entry, entries, files)
                entries.append(entry)
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise TTraceError(
            f"{path}:{len(entries) + 1} is damaged ({reason}): run the traced job again"
        ) from error
    return entries
