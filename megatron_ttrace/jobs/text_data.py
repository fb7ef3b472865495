# SPDX-License-Identifier: Apache-2.0
"""Convert files to documents of byte tokens, in the format of Megatron's indexed data sets.

A token is a byte, so any file will do, nothing is downloaded, and the vocabulary is small enough
for a model on a laptop. Documents keep their different lengths, so that samples cross document
boundaries, and ``--eod-mask-loss`` and packing have an effect.
"""

import fnmatch
import math
import os
import stat
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy
from numpy.typing import NDArray

from megatron_ttrace.jobs.flags import word_of
from megatron_ttrace.mcore import versions
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError, reported

EOD = 256
"""The token after a document: the first number above those of bytes."""

MOST_BYTES = 256 << 20
"""Limit for one document in bytes; in memory it takes twice as much."""

VOCAB_SIZE = EOD + 1
_DTYPE = numpy.uint16  # the smallest that fits, as Megatron's tool would choose


def training_flags(prefix: Path) -> list[str]:
    """Megatron's arguments to train on ``prefix`` with the matching vocabulary."""
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE))
    return ["--data-path", word_of(prefix), *tokenizer]


def split_flags(documents: int) -> list[str]:
    """Arguments for a data set of which Megatron's default ``--split 969,30,1`` has no documents.

    It would look for samples of an empty part without end.
    """
    ends = [round(share * documents) for share in (0.969, 0.999, 1)]
    return [] if ends == sorted(set(ends)) else ["--split", "100,0,0"]


def find_files(sources: Sequence[Path], pattern: str) -> list[Path]:
    """All files of ``sources``; in folders those whose name matches ``pattern``, sorted.

    Hidden files and Python's caches in folders are left out. Raises ``TTraceError`` when a source
    does not exist or a folder holds no match.
    """
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            matches = _matches(source, pattern)
            if not matches:
                raise TTraceError(f"{source}: no file in this folder matches {pattern!r}")
            files.extend(matches)
        elif source.exists():
            files.append(source)
        else:
            raise TTraceError(f"{source}: no such file or folder")
    return files


def _matches(folder: Path, pattern: str) -> list[Path]:
    """The regular files below a folder whose name matches; sorted."""
    if not pattern or "/" in pattern or "\0" in pattern or pattern == "..":
        raise TTraceError(f"--glob {pattern[:60]!a}: give a pattern of names, e.g. '*.py'")
    files = []
    # Unlike pathlib's, this walk follows no links and skips unreadable folders.
    for home, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for name in fnmatch.filter(names, "*" if pattern == "**" else pattern):
            path = Path(home, name)
            if not _is_hidden(name) and os.path.isfile(path):
                files.append(path)
    return sorted(files)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def read_documents(files: Iterable[Path], max_bytes: int | None = None) -> Iterator[bytes]:
    """The contents of ``files``, one document per file; empty files are left out.

    After ``max_bytes`` this stops; the last document is cut to fit. Raises ``TTraceError`` when a
    file cannot be read.
    """
    remaining = math.inf if max_bytes is None else max_bytes
    for path in files:
        if remaining <= 0:
            return
        with reported(f"{path} cannot be read", OSError):
            # Reading a pipe or a device may never end.
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise TTraceError(f"{path}: not a regular file")
            if min(remaining, status.st_size) > MOST_BYTES:
                raise TTraceError(
                    f"{path}: more than {MOST_BYTES:,} bytes, too many for one document; "
                    "split it, or give --max-bytes"
                )
            if not status.st_size:
                # Empty, or one of the kernel's, some of which block (/proc/kmsg).
                continue
            with path.open("rb") as file:
                content = file.read(int(min(remaining, MOST_BYTES)))
        if content:
            yield content
            remaining -= len(content)


def tokenise(content: bytes, *, append_eod: bool = True) -> NDArray[numpy.uint16]:
    """One document's tokens: its bytes and, by default, :data:`EOD`."""
    ids = numpy.frombuffer(content, dtype=numpy.uint8).astype(_DTYPE)
    return numpy.append(ids, _DTYPE(EOD)) if append_eod else ids


def write_corpus(
    documents: Iterable[bytes], prefix: Path, *, append_eod: bool = True
) -> tuple[int, int]:
    """Write ``documents``, none of them empty, to ``prefix.bin`` and ``prefix.idx``.

    Megatron's own builder writes them. Both files appear complete or not at all, the index last:
    Megatron does not notice that a data set is incomplete. With ``append_eod`` each document ends
    with the :data:`EOD` token. Returns the numbers of documents and tokens. Raises ``TTraceError``
    when there is no document, or the files cannot be written.
    """
    with versions.quiet_imports():
        from megatron.core.datasets import indexed_dataset

    bin_path = Path(indexed_dataset.get_bin_path(str(prefix)))
    idx_path = Path(indexed_dataset.get_idx_path(str(prefix)))
    count = tokens = 0
    with _own_folder_beside(prefix) as folder:
        builder = indexed_dataset.IndexedDatasetBuilder(str(folder / "bin"), dtype=_DTYPE)
        try:
            for content in documents:
                ids = tokenise(content, append_eod=append_eod)
                builder.add_document(ids, [len(ids)])
                count, tokens = count + 1, tokens + len(ids)
        finally:
            builder.data_file.close()
        if count == 0:
            raise TTraceError("nothing to write: all input files are empty")
        builder.finalize(str(folder / "idx"))
        # An old index must never exist beside new data.
        owned.remove(idx_path)
        owned.take(folder / "bin", bin_path)
        owned.take(folder / "idx", idx_path)
    return count, tokens


def standard_library(max_bytes: int) -> list[bytes]:
    """The files of Python's standard library that make so many bytes; the last one is cut."""
    library = Path(sysconfig.get_paths()["stdlib"])
    # Third-party packages are below the library's folder, and differ between machines.
    foreign = {"site-packages", "dist-packages"}
    files = [
        path
        for path in find_files([library], "*.py")
        if foreign.isdisjoint(path.relative_to(library).parts)
    ]
    return list(read_documents(files, max_bytes))


@contextmanager
def _own_folder_beside(prefix: Path) -> Iterator[Path]:
    """A folder on the file system of ``prefix``, so that moving files out of it is atomic."""
    with reported(f"{prefix} cannot be written", OSError):
        owned.make(prefix.parent)
        files = (f"{prefix.name}.bin", f"{prefix.name}.idx")
        owned.require(prefix.parent, files)
        with tempfile.TemporaryDirectory(prefix=f".{prefix.name}-", dir=prefix.parent) as folder:
            yield Path(folder)
