# SPDX-License-Identifier: Apache-2.0
"""Reads the ``.wandb`` file of an offline run: LevelDB log framing around protobuf records."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
        parsed = list(_parsed(path.read_bytes()))
        if any(r.WhichOneof("record_type") == "exit" for r in parsed):
            return parsed
        assert time.monotonic() < deadline, f"{path} never ends"
        time.sleep(0.05)


def _parsed(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for chunk in chunks(data):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(chunk)
        yield record


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No key, no mode, no settings of the machine's owner; and no run is left open."""
    import wandb

    for name in ("API_KEY", "MODE", "PROJECT", "IDENTITY_TOKEN_FILE", "BASE_URL", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    yield
    assert wandb.run is None


class OfflineRun:
    """The one offline run under a directory."""

    def __init__(self, directory: Path) -> None:
        (self.folder,) = (directory / "wandb").glob("offline-run-*")

    def records(self) -> list[Any]:
        """As they were sent."""
        (path,) = self.folder.glob("*.wandb")
        return records(path)

    def tables(self) -> dict[str, dict[str, Any]]:
        """By the start of their file names."""
        files = (self.folder / "files/media/table").glob("*.table.json")
        return {path.name.rsplit("_", 2)[0]: json.loads(path.read_text()) for path in files}

    def alerts(self) -> list[Any]:
        """Those that were sent."""
        return [r.alert for r in self.records() if r.WhichOneof("record_type") == "alert"]

    def summary(self) -> dict[str, Any]:
        """The summary fields."""
        return {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for record in self.records()
            for item in record.summary.update
        }
