# SPDX-License-Identifier: Apache-2.0
"""A wheel with kernels of one GPU architecture only: TransformerEngine's shrinks from 245 to 17 MB.

    python -m tests.gpu.slim WHEEL 90

The others' code is overwritten by zeros, which compress to nothing; all headers stay. So the driver
finds what it found before, as long as the GPU is of the architecture that was kept.

A *fat binary* is a header (magic, version, size of header, size of what follows) and entries: kind,
size of header, size of code, and at byte 28 the architecture.
"""

import struct
import sys
import zipfile
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI")


def slimmed(library: bytes, architecture: int) -> bytes:
    """The library with code for ``architecture`` alone."""
    kept = bytearray(library)
    start = kept.find(MAGIC)
    while start >= 0:
        _, version, header, size = _HEADER.unpack_from(kept, start)
        at = start + header
        end = at + size
        if (version, header) != (1, _HEADER.size) or end > len(kept):  # the number by chance
            at = end = start + len(MAGIC)
        while at < end:
            _, _, header, code, of = _ENTRY.unpack_from(kept, at)
            if of != architecture:
                kept[at + header : at + header + code] = bytes(code)
            at += max(header + code, 1)
        start = kept.find(MAGIC, end)
    return bytes(kept)


def slim(wheel: Path, architecture: int) -> None:
    """Replace a wheel; pip does not compare the files with the checksums in RECORD."""
    target = wheel.with_suffix(".new")
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as made,
    ):
        for name in source.namelist():
            data = source.read(name)
            made.writestr(name, slimmed(data, architecture) if name.endswith(".so") else data)
    target.replace(wheel)


if __name__ == "__main__":
    slim(Path(sys.argv[1]), int(sys.argv[2]))
