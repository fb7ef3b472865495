# SPDX-License-Identifier: Apache-2.0
"""Reads the ``.wandb`` file of an offline run: LevelDB log framing around protobuf records."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def chunks(data: bytes) -> Iterator[bytes]:
    """The payloads, reassembled from their fragments."""
    assert data[:4] in (b":W&B", b"")
    position = HEADER  # the file's own header has the size of a record header
    parts: list[bytes] = []
    while position + HEADER <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEADER:
            position += room
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + HEADER])
        if kind == 0:
            position += room
            continue
        position += HEADER
        if position + size > len(data):
            return  # still being written
        parts.append(data[position : position + size])
        position += size
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def records(path: Path, patience: float = 20.0) -> list[Any]:
    """All records of a finished run; wandb's service writes the last ones after ``finish()``."""
    deadline = time.monotonic() + patience
    while True:
        found = list(_parsed(path.read_bytes()))
        if any(r.WhichOneof("record_type") == "exit" for r in found):
            return found
        assert time.monotonic() < deadline, f"{path} never ends"
        time.sleep(0.05)


def _parsed(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for chunk in chunks(data):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(chunk)
        yield record
