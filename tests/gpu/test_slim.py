# SPDX-License-Identifier: Apache-2.0
"""Wheels for one GPU architecture."""

import struct
import zipfile

from tests.gpu import slim


def fat_binary(*parts):
    """Code of several architectures."""
    entries = b"".join(
        struct.pack("<HHIQ12xI32x", 2, 257, 64, len(code), of) + code for of, code in parts
    )
    return slim.MAGIC + struct.pack("<HHQ", 1, 16, len(entries)) + entries


def test_code_of_other_architectures_is_gone(tmp_path):
    """Everything else stays where it was, also a magic number that begins no binary."""
    other, mine = b"other architecture", b"this architecture!"
    before = b"elf" + slim.MAGIC + b"\xff" * 40
    library = before + fat_binary((80, other), (90, mine)) + b"rest" + fat_binary((120, other))
    wheel = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("engine.so", library)
        file.writestr("engine.py", "MAGIC = 1\n")
    slim.slim(wheel, 90)
    with zipfile.ZipFile(wheel) as file:
        assert file.read("engine.py") == b"MAGIC = 1\n"
        kept = file.read("engine.so")
    assert kept == library.replace(other, bytes(len(other)))
    assert mine in kept
