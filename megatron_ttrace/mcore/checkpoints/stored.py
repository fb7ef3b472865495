# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint: names, shapes, and the chunks in which they are stored.

Formats: PyTorch's distributed checkpoint (``--ckpt-format torch_dist`` and ``fsdp_dtensor``), whose
files do not depend on the layout, and safetensors, as exported for other programs. The
``.metadata`` of a distributed checkpoint and the heads of its tensors are pickles, which are read
as data (``inert.py``). Megatron's older format, one pickle per rank, is refused.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.checkpoints import inert
from megatron_ttrace.mcore.checkpoints.inert import Made

METADATA = ".metadata"
_LATEST = "latest_checkpointed_iteration.txt"
_OTHERS = ("optimizer.", "rng_state", "rerun_state_machine", "opt_param_scheduler", "chained_")
"""Beginnings of the names of what is no weight."""
_PREFIX = re.compile(r"^(?:model\d*\.)?(?:module\.)*")
_STORAGE = re.compile(r"torch\.(\w+)Storage")
_DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A stored part of a tensor.

    Attributes:
        offsets: of its first element in the whole tensor.
        sizes: its shape.
        file: in which it is.
        start: of its bytes, for a distributed checkpoint.
        length: of its bytes, for a distributed checkpoint.
        name: in a safetensors file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int = 0
    length: int = 0
    name: str = ""

    def read(self) -> torch.Tensor:
        """Its elements. Raises ``TTraceError`` when they are missing or damaged."""
        try:
            if self.name:
                with safe_open(self.file, framework="pt") as opened:
                    found: torch.Tensor = opened.get_tensor(self.name)
            else:
                with self.file.open("rb") as file:
                    file.seek(self.start)
                    found = _tensor(file.read(self.length), str(self.file))
        except (OSError, SafetensorError, zipfile.BadZipFile, KeyError, ValueError) as error:
            raise TTraceError(f"{self.file} is damaged or missing ({error})") from error
        if tuple(found.shape) != self.sizes:
            raise TTraceError(f"{self.file} holds another tensor than the checkpoint says")
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A weight: its shape, and where its parts are."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def weights(folder: Path) -> dict[str, Stored]:
    """The weights of a checkpoint.

    Args:
        folder: of one iteration, or with several of them, of which the latest counts.

    Raises:
        TTraceError: when there is no checkpoint in a format that is read.
    """
    home = _of_iteration(folder)
    if (home / METADATA).is_file():
        found = _distributed(home)
    elif files := sorted(home.glob("*.safetensors")):
        found = _safetensors(files)
    elif next(home.rglob("*.pt"), None) is not None:
        raise TTraceError(
            f"{home} is in Megatron's format torch, which is pickles: convert it with "
            "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"
        )
    else:
        raise TTraceError(f"{folder} holds no checkpoint: neither {METADATA} nor *.safetensors")
    if not found:
        raise TTraceError(f"{home} holds no weights")
    return found


def _of_iteration(folder: Path) -> Path:
    if not folder.is_dir():
        raise TTraceError(f"{folder}: no such directory")
    latest = folder / _LATEST
    if not latest.is_file():
        return folder
    text = latest.read_text(errors="replace").strip()
    home = folder / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
    if not home.is_dir():
        raise TTraceError(f"{latest} names {home.name}, which is not there")
    return home


def _distributed(home: Path) -> dict[str, Stored]:
    what = str(home / METADATA)
    metadata = inert.read((home / METADATA).read_bytes(), what)
    try:
        places = {
            (key.fields["fqn"], _size(key.fields["offset"])): info.fields
            for key, info in metadata.fields["storage_data"].items()
            if key.fields.get("offset") is not None
        }
        found = {}
        for name, entry in metadata.fields["state_dict_metadata"].items():
            if not entry.name.endswith(".TensorStorageMetadata") or name.startswith(_OTHERS):
                continue
            chunks = []
            for one in entry.fields["chunks"]:
                offsets = _size(one.fields["offsets"])
                place = places[name, offsets]
                if place.get("transform_descriptors"):
                    raise TTraceError(f"{home}: compressed checkpoints are not read")
                file = home / Path(place["relative_path"]).name
                sizes = _size(one.fields["sizes"])
                chunks.append(Chunk(offsets, sizes, file, place["offset"], place["length"]))
            found[_PREFIX.sub("", name)] = Stored(_size(entry.fields["size"]), tuple(chunks))
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise TTraceError(f"{what} is not that of a checkpoint ({error})") from error
    return found


def _size(value: Any) -> tuple[int, ...]:
    """A ``torch.Size``."""
    (items,) = value.arguments
    return tuple(map(int, items))


def _tensor(data: bytes, what: str) -> torch.Tensor:
    """A tensor as ``torch.save`` writes it: a zip file with its layout and its bytes."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (head,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        folder = head.removesuffix("data.pkl")
        made = inert.read(archive.read(head), what)
        if isinstance(made, Made) and made.name == "torch._utils._rebuild_parameter":
            made = made.arguments[0]
        if not isinstance(made, Made) or made.name != "torch._utils._rebuild_tensor_v2":
            raise TTraceError(f"{what} holds tensors of a kind that is not read")
        storage, offset, size, stride = made.arguments[:4]
        _, kind, key, *_ = storage.arguments[0]
        match = _STORAGE.fullmatch(kind.name)
        dtype = _DTYPES.get(match[1]) if match else None
        if dtype is None:
            raise TTraceError(f"{what} holds tensors of a dtype that is not read ({kind.name})")
        byteorder = f"{folder}byteorder"
        if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
            raise TTraceError(f"{what} was written on a big-endian machine")
        content = bytearray(archive.read(f"{folder}data/{key}"))
    if not math.prod(size):
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).as_strided(size, stride, offset)


def _safetensors(files: list[Path]) -> dict[str, Stored]:
    found = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    shape = tuple(opened.get_slice(name).get_shape())
                    chunk = Chunk((0,) * len(shape), shape, file, name=name)
                    found[_PREFIX.sub("", name)] = Stored(shape, (chunk,))
        except (OSError, SafetensorError) as error:
            raise TTraceError(f"{file} is damaged ({error})") from error
    return found
