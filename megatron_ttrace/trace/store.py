# SPDX-License-Identifier: Apache-2.0
"""Write and read one run's trace.

Layout of a trace directory::

    meta.json                    written last, atomically: a trace without it is incomplete
    rank-00000.index.jsonl       one line per traced tensor, in execution order
    rank-00000.0000.safetensors  the tensors, in chunks
    tolerances.jsonl             (reference) how far perturbed replays moved each tensor
    overrides.json               (reference) what the run that made it was told

An index line names the tensor's key, where its data lies (``file``, ``tensor``), or, where the very
same tensor was seen before under another name, the line it repeats (``same_as``). A candidate's
line also holds its placement, boxes and gradient factor, so that it can be compared offline.

``meta.json`` holds the id of the run, and size and XXH3-128 checksum of every other file. Its first
line holds the checksum of all bytes after this line (``trace/sealing.py``). So no bit of a trace
can change unnoticed:

- :func:`verify` reads every file once. Whoever decides to use a trace calls it: rank 0 for a
  reference that was made earlier, ``ttrace compare`` for both traces.
- A rank that is told which ``meta.json`` rank 0 verified (``announced``) checks that it reads this
  very one, and verifies the files that it parses. It does not read the tensors again.

A file that has the name of a trace file and is not listed in ``meta.json`` is refused.
No pickle anywhere: safetensors and JSON only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.trace.index import DATA_FILE, INDEX_FILE, Entry, decode, encode, read_index
from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.sealing import (
    CHECKSUM,
    checksums_of_files,
    open_sealed,
    seal_json,
)
from megatron_ttrace.trace.shared import run_id

__all__ = [
    "FORMAT",
    "META",
    "Entry",
    "TraceReader",
    "TraceWriter",
    "atomic_write",
    "read_meta",
    "seal",
    "verify",
]

FORMAT = 4
META = "meta.json"
_CHUNK_BYTES = 256 << 20
_MAX_META = 64 << 20
_DIGEST = re.compile("[0-9a-f]{32}")
_SEALED_SUFFIXES = (".safetensors", ".jsonl")
_SEALED_NAMES = ("overrides.json",)

_encode, _decode = encode, decode


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
        self._awaits_gpu = False
        directory.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, entry: Entry, data: torch.Tensor | None) -> int:
        """Append an entry, with its data unless it repeats another; returns its line number."""
        number = len(self._lines)
        if data is not None:
            name = str(number)
            # A GPU fills pinned memory while training goes on; _flush waits for that.
            host = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            self._chunk[name] = host.copy_(data.detach(), non_blocking=True)
            self._awaits_gpu |= data.is_cuda
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
            if self._awaits_gpu:
                torch.cuda.synchronize()
                self._awaits_gpu = False
            save_file(self._chunk, self.directory / self._file_name())
            self._chunk, self._chunk_bytes = {}, 0
            self._chunks += 1


def seal(directory: Path, meta: dict[str, Any]) -> None:
    """Declare a trace complete: ``meta.json`` with size and checksum of every file."""
    paths = _trace_files(directory)
    files = {
        path.name: {"bytes": size, "xxh3_128": digest}
        for path, (size, digest) in zip(paths, checksums_of_files(paths), strict=True)
    }
    atomic_write(
        directory / META,
        seal_json({"format": FORMAT, **meta, "run": run_id(), "files": files}),
    )


def _trace_files(directory: Path) -> list[Path]:
    """Everything in a directory that is a trace's by its name."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.suffix in _SEALED_SUFFIXES or path.name in _SEALED_NAMES
    )


def read_meta(directory: Path) -> dict[str, Any]:
    """The meta data of a complete trace. Names and sizes of all its files are checked.

    Raises:
        TTraceError: when the directory does not contain a complete trace, or contains other files.
    """
    path = directory / META
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_META + 1)
        if len(data) > _MAX_META:
            raise ValueError(f"longer than {_MAX_META} bytes")
        _check_format(directory, data)
        meta = open_sealed(data)
        files = _listed(meta)
    except FileNotFoundError:
        raise TTraceError(
            f"{directory} does not contain a complete trace (no meta.json): "
            "run the traced job again"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise TTraceError(f"{path} cannot be read ({reason}): run the traced job again") from error
    for name, (size, _) in files.items():
        found = directory / name
        if not found.is_file():
            raise TTraceError(f"{found} is missing: run the traced job again")
        if found.stat().st_size != size:
            raise TTraceError(
                f"{found} is truncated ({found.stat().st_size} of {size} bytes): "
                "run the traced job again"
            )
    for found in _trace_files(directory):
        if found.name not in files:
            raise TTraceError(
                f"{found} is not part of the trace beside it: remove it, "
                "or run the traced job again"
            )
    return meta


def _check_format(directory: Path, data: bytes) -> None:
    """Name another version's trace as such. It need not be sealed as ours are."""
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    written = document.get("format")
    if written != FORMAT:
        shown = written if type(written) is int else "unknown"
        raise TTraceError(
            f"{directory} was written in trace format {shown}, this version reads "
            f"{FORMAT}: run the traced job again"
        )


def _listed(meta: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and checksum by file name. Raises ``ValueError`` unless all of it makes sense."""
    files = meta.get("files")
    if not isinstance(files, dict):
        raise ValueError("no list of files")
    if not isinstance(meta.get("run"), str):
        raise ValueError("no id of a run")
    listed = {}
    for name, about in files.items():
        if (name != Path(name).name or name.startswith(".")) or "\0" in name:
            raise ValueError("a file name with a path in it")
        size = about.get("bytes") if isinstance(about, dict) else None
        digest = about.get("xxh3_128") if isinstance(about, dict) else None
        if type(size) is not int or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError("a file without its size and checksum")
        listed[name] = (size, digest)
    return listed


def verify(directory: Path) -> dict[str, Any]:
    """Read every file of a trace once and compare its checksum; returns the meta data.

    Raises:
        TTraceError: when the directory holds no complete, undamaged trace.
    """
    meta = read_meta(directory)
    _verify(directory, meta, meta["files"])
    return meta


def _verify(directory: Path, meta: dict[str, Any], names: Iterable[str]) -> None:
    paths = [directory / name for name in names]
    files = _listed(meta)
    for path in paths:
        if path.name not in files:
            raise TTraceError(f"{path} is missing: run the traced job again")
    try:
        found = checksums_of_files(paths)
    except OSError as error:
        raise TTraceError(
            f"{directory} cannot be read ({error.strerror or error}): run the traced job again"
        ) from error
    for path, one in zip(paths, found, strict=True):
        if one != files[path.name]:
            raise TTraceError(
                f"{path} is damaged (its checksum does not match): run the traced job again"
            )


class TraceReader:
    """Random access to a complete trace; tensors are memory-mapped."""

    def __init__(
        self, directory: Path, *, sealed: bool = True, announced: str | None = None
    ) -> None:
        """Open a trace.

        Args:
            directory: of the trace.
            sealed: ``False`` reads one that this very process is still writing.
            announced: checksum of the ``meta.json`` of a trace that another rank verified. Then
                only the files that are parsed are verified, else all.

        Raises:
            TTraceError: when it is damaged, or not the one that was announced.
        """
        self.directory = directory
        self.meta: dict[str, Any] = {}
        self._handles: dict[str, Any] = {}
        self.ranks: dict[int, list[Entry]] = {}
        if sealed:
            self.meta = read_meta(directory) if announced is not None else verify(directory)
            if announced is not None and self.checksum != announced:
                raise TTraceError(
                    f"{directory} is not the trace that rank 0 chose: another run has replaced it, "
                    "or this node sees another directory; run the check again"
                )
        files = self.meta["files"] if sealed else None
        names = sorted(files) if files is not None else sorted(os.listdir(directory))
        indices = [name for name in names if INDEX_FILE.fullmatch(name)]
        if announced is not None:
            _verify(directory, self.meta, indices)
        for name in indices:
            match = INDEX_FILE.fullmatch(name)
            assert match is not None
            self.ranks[int(match[1])] = read_index(directory / name, files)
        self._where = {
            entry.key: (rank, number)
            for rank, entries in self.ranks.items()
            for number, entry in enumerate(entries)
        }

    @property
    def checksum(self) -> str:
        """The checksum of a sealed trace's ``meta.json``, which stands for the whole trace."""
        return str(self.meta[CHECKSUM])

    def verify(self, name: str) -> None:
        """Compare the checksum of one file. Raises ``TTraceError`` when it does not match."""
        if self.meta:
            _verify(self.directory, self.meta, [name])

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
            TTraceError: when the file is damaged, or holds another tensor than the index says.
        """
        path = self.directory / entry.file
        if not DATA_FILE.fullmatch(entry.file):
            raise TTraceError(f"{self.directory} has no data of {entry.key}")
        try:
            handle = self._handles.get(entry.file)
            if handle is None:
                handle = safe_open(path, framework="pt")
                self._handles[entry.file] = handle
            tensor: torch.Tensor = handle.get_tensor(entry.tensor)
        # What the library raises at a header of noise depends on the noise.
        except (SafetensorError, OSError, ValueError, TypeError, LookupError) as error:
            raise _damaged(path, error) from error
        except (AttributeError, RuntimeError, OverflowError, MemoryError) as error:
            raise _damaged(path, error) from error
        same = (
            math.prod(entry.shape) == tensor.numel()
            if entry.same_as >= 0
            else (tuple(tensor.shape) == entry.shape)
        )
        if not same or str(tensor.dtype) != f"torch.{entry.dtype}":
            raise _damaged(path, "it holds another tensor than the index says")
        return tensor


def _damaged(path: Path, reason: object) -> TTraceError:
    text = str(reason).splitlines()[0][:160] if str(reason) else type(reason).__name__
    return TTraceError(f"{path} is damaged ({text}): run the traced job again")
