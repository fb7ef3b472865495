# SPDX-License-Identifier: Apache-2.0
"""What differs from the nearest release that this package was built for, without having that.

``released.digests`` has a record for each file, each function, and the lines outside of functions
in each file of these releases: a byte with a bit for each release that has it, and the beginning of
a digest. ``tests/jobs/released_digests.py`` writes it.
"""

import functools
import hashlib
import importlib.resources
from collections import Counter
from collections.abc import Iterator, Mapping

from megatron_ttrace.mcore import versions
from megatron_ttrace.mcore.contents import Content
from megatron_ttrace.trace import changes
from megatron_ttrace.trace.executed import Edit

_BYTES = 5
"""Of a digest."""


def nearest(held: Mapping[str, Content]) -> tuple[str, list[str]]:
    """The release that has most of these files as they are, and the names of the other files.

    Without a name if none has half of them.
    """
    digests = {name: digest(name, "", content.sha256) for name, content in held.items()}
    count = Counter(release for known in digests.values() for release in _releases(known))
    release, most = next(iter(count.most_common(1)), ("", 0))
    others = [name for name, it in digests.items() if release not in _releases(it)]
    return release if 2 * most > len(held) else "", others


def edits(name: str, source: bytes, release: str) -> Iterator[Edit]:
    """The functions of a file that are not the release's, or new."""
    functions = changes.read(source).functions
    for function, text in texts(source):
        if release not in _releases(digest(name, function, text)):
            whole = functions.get(function)
            line, is_seen = (whole.spans[0][0], whole.is_seen) if whole else (1, True)
            yield Edit(name, function, line, is_seen)


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


def _releases(known: bytes) -> list[str]:
    """The releases that have what has this digest."""
    bits = _known().get(known, 0)
    return [release for bit, release in enumerate(versions.KNOWN) if bits >> bit & 1]


@functools.cache
def _known() -> dict[bytes, int]:
    data = importlib.resources.files(__package__).joinpath("released.digests").read_bytes()
    records = (data[at : at + _BYTES + 1] for at in range(0, len(data), _BYTES + 1))
    return {record[1:]: record[0] for record in records}
