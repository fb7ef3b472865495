# SPDX-License-Identifier: Apache-2.0
"""JSON files that hold their own checksum, and checksums of other files.

A sealed file begins with the line ``{"checksum": "<32 hexadecimal digits>",``: the XXH3-128 of all
bytes after this line. Bytes are compared, not values, so a flipped bit is noticed even if the
document parses to the same value.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from megatron_ttrace.trace import codec

CHECKSUM = "checksum"
_THREADS = 4
_WORTH_THREADS = 32 << 20
"""Bytes above which threads cost less than they save."""


def _head(body: bytes) -> bytes:
    return b'{"%s": "%s",\n' % (CHECKSUM.encode(), xxhash.xxh3_128_hexdigest(body).encode())


_HEAD_SIZE = len(_head(b""))


def seal_json(document: dict[str, Any], *, indent: int = 1) -> str:
    """A non-empty JSON object as the text of a sealed file. Its first key is the checksum."""
    content = {key: value for key, value in document.items() if key != CHECKSUM}
    body = json.dumps(content, indent=indent)[1:].removeprefix("\n") + "\n"
    return (_head(body.encode()) + body.encode()).decode()


def is_sealed(data: bytes) -> bool:
    """Whether these are the bytes of an undamaged sealed file."""
    return data[:_HEAD_SIZE] == _head(data[_HEAD_SIZE:])


def open_sealed(data: bytes) -> dict[str, Any]:
    """The document of a sealed file. Raises ``CodecError`` when any byte was changed."""
    if not is_sealed(data):
        raise codec.CodecError("its checksum does not match")
    document: dict[str, Any] = json.loads(data)
    return document


def checksum_of(data: bytes) -> str:
    """XXH3-128 of some bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_of_file(path: Path) -> tuple[int, str]:
    """Size in bytes and XXH3-128 of a file. Raises ``OSError``."""
    try:
        file = codec.regular(path)
    except codec.CodecError as error:
        raise OSError(errno.EINVAL, str(error)) from error
    with file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return file.tell(), digest.hexdigest()


def checksums_of_files(paths: Iterable[Path]) -> list[tuple[int, str]]:
    """:func:`checksum_of_file` of each path, by several threads. Raises ``OSError``."""
    listed = list(paths)
    threads = min(_THREADS, os.cpu_count() or 1, len(listed))
    if threads <= 1 or sum(path.stat().st_size for path in listed) < _WORTH_THREADS:
        return [checksum_of_file(path) for path in listed]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(checksum_of_file, listed))
