# SPDX-License-Identifier: Apache-2.0
"""What differs from the nearest state of upstream's history, without having that.

``released.digests`` has a record for each file, each function, and the lines outside of functions
in each file of these states: the releases that this package was built for, and each commit of the
main branch since the oldest one left it. ``tests/jobs/released_digests.py`` writes it.
"""

import functools
import hashlib
import importlib.resources
import itertools
import struct
from collections import Counter
from collections.abc import Iterator, Mapping

from megatron_ttrace.mcore.contents import Content
from megatron_ttrace.trace import changes
from megatron_ttrace.trace.executed import Edit

_BYTES = 5
"""Of a digest."""
_FEW = 9
"""States that are compared by functions, the latest ones."""
RECORD = struct.Struct(f">HH{_BYTES}s")
"""The numbers of the first and the last of consecutive states that have what has this digest.

Before the records there is a line with the names of all states, the releases first."""

type _Spans = list[tuple[int, int]]


def nearest(held: Mapping[str, Content]) -> list[tuple[int, list[str]]]:
    """The states that have most of these files as they are: number, and the other files' names.

    No more than a few; none if none has half of the files.
    """
    digests = {name: digest(name, "", content.sha256) for name, content in held.items()}
    edges: Counter[int] = Counter()
    for known in digests.values():
        for first, last in _known().get(known, ()):
            edges[first] += 1
            edges[last + 1] -= 1
    counts = [*itertools.accumulate(edges[number] for number in range(len(states())))]
    most = max(counts)
    if 2 * most <= len(held):
        return []
    numbers = [number for number, count in enumerate(counts) if count == most][-_FEW:]
    return [(it, [name for name in held if not _has(it, digests[name])]) for it in numbers]


def edits(name: str, source: bytes, state: int) -> list[Edit]:
    """The functions of a file that are not the state's, or new."""
    return [edit for it, edit in _functions(name, source) if not _has(state, it)]


def unknown(name: str, source: bytes) -> list[Edit]:
    """The functions of a file that no state has."""
    # The other lines of a file of another commit are mostly imports.
    return [it for known, it in _functions(name, source) if it.function and known not in _known()]


@functools.lru_cache(maxsize=64)  # several states are asked for the same files
def _functions(name: str, source: bytes) -> list[tuple[bytes, Edit]]:
    """The digests of a file's functions, each with the edit if it is one."""
    functions, found = changes.read(source).functions, []
    for function, text in texts(source):
        whole = functions.get(function)
        line, is_seen = (whole.spans[0][0], whole.is_seen) if whole else (1, True)
        found.append((digest(name, function, text), Edit(name, function, line, is_seen)))
    return found


def texts(source: bytes) -> Iterator[tuple[str, bytes]]:
    """The lines of each function, by its qualified name, and of what is outside of functions."""
    lines = [line.rstrip() for line in source.splitlines()]
    outside = dict(enumerate(lines))
    for name, function in changes.read(source).functions.items():
        spanned = [number for a, b in function.spans for number in range(a - 1, b)]
        yield name, b"\n".join(lines[number] for number in spanned)
        for number in spanned:
            outside.pop(number, None)
    yield "", b"\n".join(outside.values())


def digest(name: str, function: str, content: bytes) -> bytes:
    """The beginning of a digest of a function, or of a file."""
    return hashlib.sha256(f"{name}\n{function}\n".encode() + content).digest()[:_BYTES]


def states() -> list[str]:
    """Releases, then the beginnings of the ids of commits, the oldest first."""
    return _data()[0].decode().split()


def _has(state: int, known: bytes) -> bool:
    """Whether a state has what has this digest."""
    return any(first <= state <= last for first, last in _known().get(known, ()))


@functools.cache
def _known() -> dict[bytes, _Spans]:
    known: dict[bytes, _Spans] = {}
    for first, last, of in RECORD.iter_unpack(_data()[1]):
        known.setdefault(of, []).append((first, last))
    return known


@functools.cache
def _data() -> tuple[bytes, bytes]:
    data = importlib.resources.files(__package__).joinpath("released.digests").read_bytes()
    names, _, records = data.partition(b"\n")
    return names, records
