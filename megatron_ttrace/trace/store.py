# SPDX-License-Identifier: Apache-2.0
"""Write and read one run's trace.

Layout of a trace directory::

    meta.json                    written last, atomically: a trace without it is incomplete
    rank-00000.index.jsonl       one line per traced tensor, in execution order
    rank-00000.0000.safetensors  the tensors, in chunks
    tolerances.jsonl             (reference) how far perturbed replays moved each tensor

An index line names the tensor's key, where its data lies (``file``, ``tensor``), or, where the very
same tensor was seen before under another name, the line it repeats (``same_as``). A candidate's
line also holds its placement, boxes and gradient factor, so that it can be compared offline.
No pickle anywhere: safetensors and JSON only.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.records import Kind, TraceKey

FORMAT = 2
_CHUNK_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One index line: a tensor of a trace.

    ``shape`` is the stored shape, ``logical_shape`` the whole tensor's (the same in a reference).
    ``factor`` is what this run's values must be divided by to be the reference's. ``misfit`` says
    why the tensor has no place in the reference, if it has none. ``sums`` is what was found of a
    tensor that was judged by other means than its elements: no data is kept of it.
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


def atomic_write(path: Path, text: str) -> None:
    """Write a small file so that readers see all of it or nothing of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


class TraceWriter:
    """Appends tensors of one rank to a trace directory.

    Data is copied when it is added (training may overwrite it at once) and written in chunks, so
    that memory stays bounded.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self._stem = f"rank-{rank:05d}"
        self._lines: list[str] = []
        self._chunk: dict[str, torch.Tensor] = {}
        self._chunk_bytes = 0
        self._chunks = 0
        directory.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, entry: Entry, data: torch.Tensor | None) -> int:
        """Append an entry, with its data unless it repeats another; returns its line number."""
        number = len(self._lines)
        if data is not None:
            name = str(number)
            self._chunk[name] = data.detach().to("cpu", copy=True).contiguous()
            self._chunk_bytes += self._chunk[name].nbytes
            entry = dataclasses.replace(entry, file=self._file_name(), tensor=name)
        self._lines.append(_encode(entry))
        if self._chunk_bytes >= _CHUNK_BYTES:
            self._flush()
        return number

    def close(self) -> None:
        """Write what is left, and the index."""
        self._flush()
        atomic_write(
            self.directory / f"{self._stem}.index.jsonl",
            "".join(line + "\n" for line in self._lines),
        )

    def _file_name(self) -> str:
        return f"{self._stem}.{self._chunks:04d}.safetensors"

    def _flush(self) -> None:
        if self._chunk:
            save_file(self._chunk, self.directory / self._file_name())
            self._chunk, self._chunk_bytes = {}, 0
            self._chunks += 1


def seal(directory: Path, meta: dict[str, Any]) -> None:
    """Declare a trace complete: ``meta.json`` with the sizes of every file it consists of."""
    files = {
        path.name: path.stat().st_size
        for path in sorted(directory.iterdir())
        if path.suffix in (".safetensors", ".jsonl")
    }
    atomic_write(
        directory / "meta.json",
        json.dumps({"format": FORMAT, **meta, "files": files}, indent=1) + "\n",
    )


def read_meta(directory: Path) -> dict[str, Any]:
    """The meta data of a complete trace.

    Raises:
        TTraceError: when the directory holds no complete, undamaged trace.
    """
    path = directory / "meta.json"
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        written = meta.get("format")
        files = list(meta["files"].items()) if written == FORMAT else []
    except FileNotFoundError:
        raise TTraceError(
            f"{directory} holds no complete trace (no meta.json): run the traced job again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TTraceError(f"{path} cannot be read ({error}): run the traced job again") from error
    if written != FORMAT:
        raise TTraceError(
            f"{directory} was written in trace format {written}, this version reads "
            f"{FORMAT}: run the traced job again"
        )
    for name, size in files:
        found = directory / name
        if not found.is_file():
            raise TTraceError(f"{found} is missing: run the traced job again")
        if found.stat().st_size != size:
            raise TTraceError(
                f"{found} is truncated ({found.stat().st_size} of {size} bytes): "
                "run the traced job again"
            )
    return meta


class TraceReader:
    """Random access to a complete trace; tensors are memory-mapped."""

    def __init__(self, directory: Path, *, sealed: bool = True) -> None:
        """Open a trace; ``sealed=False`` reads one that this very process is still writing."""
        self.directory = directory
        self.meta = read_meta(directory) if sealed else {}
        self._handles: dict[str, Any] = {}
        self.ranks: dict[int, list[Entry]] = {}
        for path in sorted(directory.glob("rank-*.index.jsonl")):
            rank = int(path.name.split(".")[0].removeprefix("rank-"))
            self.ranks[rank] = _read_index(path)
        self._where = {
            entry.key: (rank, number)
            for rank, entries in self.ranks.items()
            for number, entry in enumerate(entries)
        }

    def __contains__(self, key: TraceKey) -> bool:
        return key in self._where

    def __iter__(self) -> Iterator[TraceKey]:
        """All keys, in execution order (of the first rank that has them)."""
        return iter(self._where)

    def entry(self, key: TraceKey) -> Entry:
        """The entry of ``key`` with its data location resolved. Raises ``KeyError``."""
        rank, number = self._where[key]
        return self.resolve(rank, number)

    def primary(self, key: TraceKey) -> TraceKey:
        """The first name under which this very tensor was traced."""
        rank, number = self._where[key]
        entry = self.ranks[rank][number]
        return self.ranks[rank][entry.same_as].key if entry.same_as >= 0 else key

    def resolve(self, rank: int, number: int) -> Entry:
        """The entry at a line, pointing at the data of the line it repeats, if it repeats one."""
        entry = self.ranks[rank][number]
        if entry.same_as < 0:
            return entry
        source = self.ranks[rank][entry.same_as]
        return dataclasses.replace(entry, file=source.file, tensor=source.tensor)

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The stored tensor, on the CPU, backed by the file.

        Raises:
            TTraceError: when the file is damaged.
        """
        try:
            handle = self._handles.get(entry.file)
            if handle is None:
                handle = safe_open(self.directory / entry.file, framework="pt")
                self._handles[entry.file] = handle
            tensor: torch.Tensor = handle.get_tensor(entry.tensor)
        except (SafetensorError, OSError) as error:
            raise TTraceError(
                f"{self.directory / entry.file} is damaged ({error}): run the traced job again"
            ) from error
        return tensor


def _encode(entry: Entry) -> str:
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
    if entry.boxes or entry.logical_shape:
        line |= {
            "logical_shape": entry.logical_shape,
            "placement": entry.placement,
            "boxes": [[box.logical, box.extent, box.local] for box in entry.boxes],
            "factor": entry.factor,
        }
    return json.dumps(line)


def _read_index(path: Path) -> list[Entry]:
    entries: list[Entry] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for text in lines:
                entry = _decode(json.loads(text))
                if entry.same_as >= len(entries):
                    raise ValueError(f"repeats line {entry.same_as}, which does not precede it")
                entries.append(entry)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TTraceError(
            f"{path}:{len(entries) + 1} is damaged ({error}): run the traced job again"
        ) from error
    return entries


def _decode(line: dict[str, Any]) -> Entry:
    iteration, microbatch, kind, name, index = line["key"]
    shape = tuple(line["shape"])
    return Entry(
        key=TraceKey(iteration, microbatch, Kind(kind), name, index),
        shape=shape,
        dtype=line["dtype"],
        file=line.get("file", ""),
        tensor=line.get("tensor", ""),
        same_as=line.get("same_as", -1),
        logical_shape=tuple(line.get("logical_shape", shape)),
        placement=line.get("placement", "Replicate"),
        boxes=tuple(
            Box(tuple(logical), tuple(extent), tuple(local))
            for logical, extent, local in line.get("boxes", ())
        ),
        factor=line.get("factor", 1.0),
        misfit=line.get("misfit", ""),
        sums=tuple(line.get("sums", ())),
    )
