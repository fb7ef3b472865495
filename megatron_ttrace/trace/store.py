# SPDX-License-Identifier: Apache-2.0
"""Write and read one run's trace.

Layout of a trace directory::

    meta.json                    written last, atomically: a trace without it is incomplete
    rank-00000.index.jsonl       one line per traced tensor, in execution order
    rank-00000.0000.safetensors  the tensors, in chunks
    tolerances.jsonl             (reference) how far perturbed replays moved each tensor
    calls.jsonl                  (reference) norms of what functions were given and returned
    overrides.json               (reference) the order to the run that made it
    start.0000.safetensors       (reference on a CPU) start values of moments (``trace/start.py``)
    traced.json                  (reference) until it is complete: all tensors are there already

An index line names the tensor's key and where its data is (``file``, ``tensor``), or, if the same
tensor was seen before under another name, the line that it repeats (``same_as``). A candidate's
line also holds its placement, boxes and gradient factor, so that it can be compared offline.

``meta.json`` holds the id of the run, and size and XXH3-128 checksum of every other file. Its first
line holds the checksum of all bytes after this line (``trace/sealing.py``). So a changed bit is
always noticed: rank 0 verifies every file (:func:`verify`). The other ranks get the checksum of its
``meta.json`` (``announced``), check that they read the same one, and verify the files that they
parse, but not all tensors. A trace file that ``meta.json`` does not list is refused.
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.budget import Budget
from megatron_ttrace.trace.codec import Count, Record
from megatron_ttrace.trace.errors import TTraceError, brief
from megatron_ttrace.trace.index import DATA_FILE, INDEX_FILE, Entry, encode, read_index
from megatron_ttrace.trace.mapped import MappedFile, lacks_memory
from megatron_ttrace.trace.meta import CandidateMeta, ReferenceMeta
from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.sealing import CHECKSUM, checksums_of_files, open_sealed, seal_json
from megatron_ttrace.trace.shared import run_id

__all__ = ["Entry", "TraceReader", "TraceWriter"]

FORMAT = 7
META = "meta.json"
TRACED = "traced.json"
_MAX_META = 64 << 20
_WRITERS = 4
"""Threads that write what a GPU computed."""
_DEFAULT = Budget()
_DIGEST = re.compile("[0-9a-f]{32}")
_SEALED_SUFFIXES = (".safetensors", ".jsonl")
_SEALED_NAMES = ("overrides.json",)

_ERRORS_OF_NOISE = (
    *(SafetensorError, OSError, ValueError, TypeError, LookupError),
    *(AttributeError, RuntimeError, OverflowError, MemoryError),
)
"""What safetensors may raise at a header of noise."""


def atomic_write(path: Path, text: str) -> None:
    """Write a small file so that readers see either all of it or none of it."""
    # A damaged one is made again: it needs no seal.
    owned.write(path, [text], sealed=False)


class TraceWriter:
    """Appends tensors of one rank to a trace directory.

    Data is copied when it is added, because training may overwrite it, and written in chunks by a
    thread, or by several if it comes from a GPU, which is faster than they are. One chunk is filled
    while others are written; when all are full, adding waits. What a thread raises is raised by a
    later call.
    """

    def __init__(self, directory: Path, rank: int, budget: Budget = _DEFAULT) -> None:
        self.directory = directory
        self._unwritten = budget.unwritten
        self._stem = f"rank-{rank:05d}"
        self._lines: list[str] = []
        self._chunk: dict[str, torch.Tensor] = {}
        self._chunk_bytes = 0
        self._chunks = 0
        self._awaits_gpu = False
        self._writers = 1
        self._threads: ThreadPoolExecutor | None = None
        self._writing: deque[Future[None]] = deque()
        owned.make(directory)

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, entry: Entry, data: torch.Tensor | None) -> int:
        """Append an entry, with its data unless it repeats another; returns its line number."""
        number = len(self._lines)
        if data is not None:
            name = str(number)
            # A GPU fills pinned memory while training goes on; _write waits for that.
            host = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            self._chunk[name] = host.copy_(data.detach(), non_blocking=True)
            if data.is_cuda:
                self._awaits_gpu, self._writers = True, _WRITERS
            self._chunk_bytes += self._chunk[name].nbytes
            entry = dataclasses.replace(entry, file=self._file_name(), tensor=name)
        self._lines.append(encode(entry))
        if self._chunk_bytes >= self._unwritten // (self._writers + 1):
            self._flush()
        return number

    def close(self) -> None:
        """Write what is left, and the index."""
        try:
            self._flush()
            self._settle(0)
        finally:
            if self._threads is not None:
                self._threads.shutdown()
                self._threads = None
        atomic_write(
            self.directory / f"{self._stem}.index.jsonl",
            "".join(line + "\n" for line in self._lines),
        )

    def _file_name(self) -> str:
        return f"{self._stem}.{self._chunks:04d}.safetensors"

    def _flush(self) -> None:
        if not self._chunk:
            return
        self._settle(self._writers - 1)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._writers)
        path = self.directory / self._file_name()
        self._writing.append(self._threads.submit(_write, self._chunk, path, self._awaits_gpu))
        self._chunk, self._chunk_bytes, self._awaits_gpu = {}, 0, False
        self._chunks += 1

    def _settle(self, most: int) -> None:
        """Wait until at most so many chunks are being written."""
        while len(self._writing) > most:
            self._writing.popleft().result()


def _write(chunk: dict[str, torch.Tensor], path: Path, awaits_gpu: bool) -> None:
    if awaits_gpu:
        torch.cuda.synchronize()
    with owned.written_by_others(path) as temporary:
        save_file(chunk, temporary)


def announce(directory: Path, meta: dict[str, Any]) -> None:
    """Declare the tensors of a trace complete, with the meta data that is known until then."""
    atomic_write(directory / TRACED, json.dumps(meta))


def seal(directory: Path, meta: dict[str, Any]) -> None:
    """Declare a trace complete: ``meta.json`` with size and checksum of every file."""
    owned.discard(directory / TRACED)
    paths = _trace_files(directory)
    files = {
        path.name: {"bytes": size, "xxh3_128": digest}
        for path, (size, digest) in zip(paths, checksums_of_files(paths), strict=True)
    }
    document = {"format": FORMAT, **meta, "run": run_id(), "files": files}
    atomic_write(directory / META, seal_json(document))


def _trace_files(directory: Path) -> list[Path]:
    """The files of a directory that have the name of a trace file."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.suffix in _SEALED_SUFFIXES or path.name in _SEALED_NAMES
    )


def read_meta(directory: Path) -> dict[str, Any]:
    """The meta data of a complete trace. Names and sizes of all its files are checked.

    Raises ``TTraceError`` when the directory has no complete trace, or other files of a trace.
    """
    path = directory / META
    try:
        data = codec.read(path, _MAX_META)
        _check_format(directory, data)
        meta = open_sealed(data)
        files = _listed(meta)
    except FileNotFoundError:
        raise _unusable(directory, "does not contain a complete trace (no meta.json)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, f"cannot be read ({brief(error)})") from error
    for name, (size, _) in files.items():
        file = directory / name
        if not file.is_file():
            raise _unusable(file, "is missing")
        if (left := file.stat().st_size) != size:
            raise _unusable(file, f"is truncated ({left} of {size} bytes)")
    for file in _trace_files(directory):
        if file.name not in files:
            raise TTraceError(
                f"{file} is not part of the trace beside it: remove it, or run the traced job again"
            )
    return meta


def meta_as[M: Record](kind: type[M], directory: Path, document: dict[str, Any]) -> M:
    """The meta data of a trace as a record. Raises ``TTraceError`` when it does not fit."""
    try:
        return kind.from_json(document)
    except codec.CodecError as error:
        raise _unusable(directory / META, f"is damaged ({error})") from error


def _unusable(path: Path, reason: str) -> TTraceError:
    return TTraceError(f"{path} {reason}: run the traced job again")


def _check_format(directory: Path, data: bytes) -> None:
    """Refuse another version's trace, which may be sealed in another way."""
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    written = document.get("format")
    if written != FORMAT:
        shown = written if type(written) is int else "unknown"
        raise _unusable(
            directory, f"was written in trace format {shown}, this version reads {FORMAT}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    bytes: Count
    xxh3_128: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Meta:
    run: str
    files: dict[str, _File]

    def contradiction(self) -> str:
        for name, file in self.files.items():
            if name != Path(name).name or name.startswith(".") or "\0" in name:
                return "a file name with a path in it"
            if not _DIGEST.fullmatch(file.xxh3_128):
                return "a file without its checksum"
        return ""


def _listed(meta: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and checksum by file name. Raises ``CodecError`` unless all of it makes sense."""
    return {n: dataclasses.astuple(file) for n, file in codec.decode(_Meta, meta).files.items()}


def verify(directory: Path) -> dict[str, Any]:
    """Read every file of a trace and compare its checksum; returns the meta data.

    Raises ``TTraceError`` when the directory holds no complete, undamaged trace.
    """
    meta = read_meta(directory)
    _verify(directory, meta, meta["files"])
    return meta


def _chosen(directory: Path, announced: str) -> dict[str, Any]:
    """The meta data of the trace that another rank verified. Raises as :func:`read_meta`."""
    meta = read_meta(directory)
    if meta[CHECKSUM] != announced:
        raise TTraceError(
            f"{directory} is not the trace that rank 0 chose: another run has replaced it, "
            "or this node sees a different directory; run the check again"
        )
    return meta


def _indices(directory: Path, files: Iterable[str]) -> dict[str, bytes]:
    """The contents of the index files among these."""
    return {name: (directory / name).read_bytes() for name in files if INDEX_FILE.fullmatch(name)}


def _verify(directory: Path, meta: dict[str, Any], names: Iterable[str]) -> None:
    paths = [directory / name for name in names]
    files = _listed(meta)
    for path in paths:
        if path.name not in files:
            raise _unusable(path, "is missing")
    try:
        checksums = checksums_of_files(paths)
    except OSError as error:
        raise _unusable(directory, f"cannot be read ({error.strerror or error})") from error
    for path, checksum in zip(paths, checksums, strict=True):
        if checksum != files[path.name]:
            raise _unusable(path, "is damaged (its checksum does not match)")


class TraceReader:
    """Random access to a complete trace; tensors are memory-mapped."""

    def __init__(
        self,
        directory: Path,
        *,
        sealed: bool = True,
        announced: str | None = None,
        budget: Budget = _DEFAULT,
    ) -> None:
        """Open a trace.

        ``sealed`` is false for one that is not complete; all its tensors are there. ``announced``
        is the checksum of the ``meta.json`` of a trace that another rank verified: then only the
        files that are parsed are verified, else all. ``budget`` bounds the pages that stay mapped.

        Raises ``TTraceError`` when it is damaged, or not the one that was announced.
        """
        self.directory = directory
        self.meta: dict[str, Any] = {}
        self._folder: int | None = None
        self._parsed: dict[str, bytes] = {}
        self._views: dict[str, MappedFile] = {}
        self._mapped, self._most_mapped = 0, budget.mapped
        self.ranks: dict[int, list[Entry]] = {}
        if sealed:
            self.meta = verify(directory) if announced is None else _chosen(directory, announced)
        files = self.meta["files"] if sealed else None
        self.files = sorted(os.listdir(directory) if files is None else files)
        indices = {name: match for name in self.files if (match := INDEX_FILE.fullmatch(name))}
        if announced is not None:
            _verify(directory, self.meta, indices)
        for name, match in indices.items():
            self.ranks[int(match[1])] = read_index(directory / name, files)
        self._where = {
            entry.key: (rank, number)
            for rank, entries in self.ranks.items()
            for number, entry in enumerate(entries)
        }

    @classmethod
    def early(cls, directory: Path, budget: Budget) -> Self:
        """Open a trace that another process was heard to :func:`announce`.

        It may be moved meanwhile, so that it is read through a descriptor of its directory.
        Raises ``OSError`` or ``TTraceError`` when it was moved before, or this system has no
        ``/proc``. Then, and later, :meth:`complete` is what makes it known by its place.
        """
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            place = Path("/proc/self/fd") / str(folder)
            reader = cls(place, sealed=False, budget=budget)
            reader.meta = json.loads((place / TRACED).read_bytes())
            reader._parsed = _indices(place, reader.files)
        except BaseException:
            os.close(folder)
            raise
        reader._folder = folder
        return reader

    def complete(self, directory: Path, announced: str) -> None:
        """Go on with what :meth:`early` opened as a complete trace at its place.

        Raises ``TTraceError`` as when it is opened there, or when it is another one.
        """
        meta = _chosen(directory, announced)
        indices = _indices(directory, files := sorted(meta["files"]))
        _verify(directory, meta, indices)
        used = {entry.file for entries in self.ranks.values() for entry in entries}
        if indices != self._parsed or not used <= {"", *files}:
            raise TTraceError(f"{directory} is not the trace that was read: run the check again")
        self.directory, self.meta, self.files = directory, meta, files
        self._views, self._mapped = {}, 0
        vars(self).pop("reference", None)
        self.close()

    def close(self) -> None:
        """Give up the descriptor of what :meth:`early` opened."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    __del__ = close

    @property
    def is_complete(self) -> bool:
        """Whether it is sealed, or nobody else writes it."""
        return self._folder is None

    @functools.cached_property
    def reference(self) -> ReferenceMeta:
        """The meta data of a reference. Raises ``TTraceError`` when it contradicts itself."""
        return meta_as(ReferenceMeta, self.directory, self.meta)

    @functools.cached_property
    def candidate(self) -> CandidateMeta:
        """The meta data of a candidate. Raises ``TTraceError`` when it contradicts itself."""
        return meta_as(CandidateMeta, self.directory, self.meta)

    @property
    def checksum(self) -> str:
        """The checksum of a sealed trace's ``meta.json``, which identifies the whole trace."""
        return str(self.meta[CHECKSUM])

    @property
    def stored_bytes(self) -> int:
        """The size of all files that hold tensors."""
        files = _listed(self.meta)
        return sum(size for name, (size, _) in files.items() if DATA_FILE.fullmatch(name))

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
        """The entry of ``key`` of the last rank that has one. Raises ``KeyError``."""
        rank, number = self._where[key]
        return self.ranks[rank][number]

    def primary(self, key: TraceKey) -> TraceKey:
        """The first name under which this tensor was traced."""
        rank, number = self._where[key]
        entry = self.ranks[rank][number]
        return self.ranks[rank][entry.same_as].key if entry.same_as >= 0 else key

    def shape(self, key: TraceKey) -> tuple[int, ...] | None:
        """The shape of a tensor; ``None`` if there is no such tensor."""
        return self.entry(key).shape if key in self else None

    def data(self, key: TraceKey) -> torch.Tensor:
        """The tensor of a key. Raises as :meth:`tensor`, and ``KeyError``."""
        return self.tensor(self.entry(key))

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The stored tensor, on the CPU, backed by the file.

        Raises ``TTraceError`` when the file is damaged, or holds another tensor than the index
        says.
        """
        if entry.file not in self._views and not DATA_FILE.fullmatch(entry.file):
            raise TTraceError(f"{self.directory} has no data of {entry.key}")
        tensor = self.stored(entry.file, entry.tensor)
        if tensor is not None and tensor.dtype is getattr(torch, entry.dtype, None):
            # A view of another shape may have been traced under another name.
            is_view = entry.same_as >= 0 and math.prod(entry.shape) == tensor.numel()
            if is_view or tuple(tensor.shape) == entry.shape:
                return tensor
        path = self.directory / entry.file
        raise _unusable(path, "is damaged (it holds another tensor than the index says)")

    def stored(self, file: str, name: str) -> torch.Tensor | None:
        """A tensor by the names of its file and in it, as of :meth:`tensor`; ``None`` if absent."""
        if self._mapped >= self._most_mapped:
            # A page that was read counts as memory of this process as long as its file is mapped.
            self._views = {name: view for name, view in self._views.items() if view.release()}
            self._mapped = 0
        try:
            tensor = self._opened(file).get(name)
        except ValueError as error:
            raise _unusable(self.directory / file, f"is damaged ({error})") from error
        self._mapped += 0 if tensor is None else tensor.nbytes
        return tensor

    def names(self, file: str) -> list[str]:
        """The names of all tensors in a file. Raises ``TTraceError`` when it is damaged."""
        return self._opened(file).names

    def _opened(self, file: str) -> MappedFile:
        if file not in self._views:
            path = self.directory / file
            try:
                self._views[file] = MappedFile(path)
            except _ERRORS_OF_NOISE as error:
                if not (self.is_complete or path.exists()):
                    raise TTraceError("the reference run ended while its trace was read") from error
                if isinstance(error, MemoryError) or lacks_memory(path):
                    raise TTraceError(f"{path}: no memory to map it ({brief(error)})") from error
                raise _unusable(path, f"is damaged ({brief(error)})") from error
        return self._views[file]
