# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds: logical tensors and numbers, and how to read them.

Formats: Megatron's distributed checkpoint (``--ckpt-format torch_dist``), that of Megatron-FSDP
(``fsdp_dtensor``), and safetensors, as exported for other programs. The first two are torch's
distributed checkpoints (DCP), described by a pickle, which nothing here reads: torch and Megatron
do, as they do in training. No process group is needed, and none is used: what is read depends on no
layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import filesystem, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ttrace.mcore import versions
from megatron_ttrace.mcore.checkpoints import numbers
from megatron_ttrace.mcore.checkpoints.loading import NAME, TRACKER
from megatron_ttrace.mcore.optimizer import MOMENTS
from megatron_ttrace.trace import codec, small_files
from megatron_ttrace.trace.errors import TTraceError, reported
from megatron_ttrace.trace.records import Kind
from megatron_ttrace.trace.states import Item, State

_DESCRIPTION = ".metadata"
_MARK = "metadata.json"
"""Megatron's own, beside PyTorch's description, in ``torch_dist`` only."""
_INDEX, _ALONE = "model.safetensors.index.json", "model.safetensors"
_PREFIX = re.compile(r"^(?:model\d*\.)?(?:module\.)*")
_CHAINED = re.compile(r"^chained_\d+\.")
_STATE = re.compile(r"optimizer\.state\.(?P<slot>[^.]+)\.(?P<name>.+)")
_STATE_OF_FSDP = re.compile(r"optimizer\.state\.(?P<name>.+)\.(?P<slot>[^.]+)")
_EXPERT_OF_FSDP = re.compile(
    r"\.experts\.(?:local_experts\.(?P<own>\d+)\.(?P<rest>.+)"
    r"|(?P<module>.+\.)(?P<leaf>weight|bias)(?P<number>\d+)(?P<half>_[wv])?)$"
)
_HALVES = "_w", "_v"
"""Ends of names of the gate and of the rest of a gated ``linear_fc1``, in ``fsdp_dtensor``."""
_NO_STATE = ("rng_state", "rerun_state_machine")
_NEEDED = ("args", "iteration", "opt_param_scheduler.", "optimizer.")
_GROUPS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/")
_ALIGNED = 64
_BLOCKS = "z", "x", "B", "C", "dt"
_BLOCK = re.compile(rf"(.+\.mixer\..+\.(?:weight|bias))\.({'|'.join(_BLOCKS)})")
_NUMBER = re.compile(r"(?<=\.)(\d+)\.")

_SLOTS: Mapping[str, State] = MappingProxyType(
    {
        "param": State.MAIN,
        "fp32_param": State.MAIN,
        **{
            slot: State.EXP_AVG if kind is Kind.EXP_AVG else State.EXP_AVG_SQ
            for slots in MOMENTS.values()
            for slot, kind in slots.items()
        },
    }
)
"""Main weights with and without the distributed optimizer, and what optimizers keep."""


class Format(StrEnum):
    """How a checkpoint is stored."""

    TORCH_DIST = "torch_dist"
    FSDP_DTENSOR = "fsdp_dtensor"
    SAFETENSORS = "safetensors"


type Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A logical tensor, or a part of one.

    Attributes:
        shape: of the tensor.
        load: returns the part of what is stored at these indices and ranges of its first dims.
        index: where the tensor is in what is stored.
        padding: ranges of elements of a bucket that may belong to no parameter.
    """

    shape: tuple[int, ...]
    load: Callable[[Index], torch.Tensor]
    index: Index = ()
    padding: tuple[tuple[int, int], ...] = ()

    def read(self) -> torch.Tensor:
        """The tensor, on the CPU.

        Raises:
            TTraceError: when it is missing or damaged.
        """
        return self.load(self.index)

    def at(self, *index: int) -> Stored | None:
        """The part at these indices of the first dimensions; ``None`` if it has no such part."""
        inside = len(index) <= len(self.shape) and all(map(int.__lt__, index, self.shape))
        if not inside:
            return None
        return Stored(self.shape[len(index) :], self.load, (*self.index, *index))

    def rows(self, start: int, stop: int) -> Stored:
        """A range of the first dimension of a tensor, whose parts this cannot give."""
        return Stored((stop - start, *self.shape[1:]), self.load, (*self.index, slice(start, stop)))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One iteration's checkpoint.

    Attributes:
        format: how it is stored.
        tensors: all that have a logical form, as they are stored.
        numbers: by names that no layout changes, as of :mod:`.numbers`.
        unread: tensors without a logical form (buckets of the distributed optimizer), by key.
    """

    format: Format
    tensors: Mapping[Item, Stored]
    numbers: Mapping[str, numbers.Number] = dataclasses.field(default_factory=dict)
    unread: Mapping[str, Stored] = dataclasses.field(default_factory=dict)

    def find(self, item: Item) -> tuple[Item, Stored] | None:
        """A tensor, or the part of a stack of layers, of experts or of both that it is.

        Layers and experts are counted over the whole model in the item's name:
        ``decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight``.

        Returns:
            The item that is stored, and the tensor or its part of this; ``None`` without one.
        """
        matches = list(_NUMBER.finditer(item.name))
        # The fewest numbers first: a tensor of its own comes before a part of a stack.
        for count in range(len(matches) + 1):
            for stacked in itertools.combinations(matches, count):
                name = item.name
                for match in reversed(stacked):
                    name = name[: match.start()] + name[match.end() :]
                stack = dataclasses.replace(item, name=name)
                stored = self.tensors.get(stack)
                part = stored and stored.at(*(int(match[1]) for match in stacked))
                if part is not None:
                    return stack, part
        return None


def with_blocks_stacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with one tensor for all blocks that a Mamba mixer stacks in a weight.

    They are stored apart, because each is divided by itself (``_split_tensor_factory`` in
    megatron/core/ssm/mamba_mixer.py).
    """
    tensors: dict[Item, Stored] = {}
    stacked: dict[Item, dict[str, Stored]] = {}
    for item, stored in checkpoint.tensors.items():
        match = _BLOCK.fullmatch(item.name)
        if match is None:
            tensors[item] = stored
        else:
            blocks = stacked.setdefault(dataclasses.replace(item, name=match[1]), {})
            blocks[match[2]] = stored
    for item, blocks in stacked.items():
        tensors[item] = _stacked([blocks[name] for name in _BLOCKS if name in blocks])
    return dataclasses.replace(checkpoint, tensors=tensors)


def _stacked(blocks: Sequence[Stored]) -> Stored:
    """Several tensors as one, along the first dimension."""
    rows = sum(block.shape[0] for block in blocks)
    return Stored(
        (rows, *blocks[0].shape[1:]),
        lambda index: torch.cat([block.read() for block in blocks])[index],
    )


def open_checkpoint(folder: Path) -> Checkpoint:
    """What the checkpoint of one iteration holds, or of the latest in a folder of several.

    Tensors are read when they are asked for.

    Raises:
        TTraceError: when there is no checkpoint in a format that is read.
    """
    home = _of_iteration(folder)
    if (home / _DESCRIPTION).is_file():
        checkpoint = _distributed(home)
    elif next(home.glob("*.safetensors"), None) is not None:
        weights = {
            Item(State.WEIGHT, _PREFIX.sub("", name)): stored
            for name, stored in safetensors_of(home).items()
        }
        checkpoint = Checkpoint(Format.SAFETENSORS, weights)
    elif iterations := sorted(path.name for path in home.glob("iter_*") if path.is_dir()):
        names = f"{', '.join(iterations[-3:])}{' and older ones' * (len(iterations) > 3)}"
        raise TTraceError(f"{folder} has {names}, but no {TRACKER}: give the folder of one of them")
    elif next(home.rglob("*.pt"), None) is not None:
        raise TTraceError(
            f"{home} is in Megatron's format torch, which is pickles: convert it with "
            "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"
        )
    else:
        raise TTraceError(f"{folder} holds no checkpoint: neither {_DESCRIPTION} nor *.safetensors")
    if not checkpoint.tensors:
        raise TTraceError(f"{home} holds no weights")
    return checkpoint


def _of_iteration(folder: Path) -> Path:
    if not folder.is_dir():
        raise TTraceError(
            f"{folder}: {'not a' if folder.exists() else 'no such'} directory: give a checkpoint's"
        )
    latest = folder / TRACKER
    if not latest.is_file():
        return folder
    with reported(f"{latest} cannot be read", OSError, ValueError):
        text = small_files.text(latest).strip()
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else None
    home = folder / ("release" if number is None else NAME.format(number))
    if not home.is_dir():
        raise TTraceError(f"{latest} names {home.name}, which does not exist")
    return home


class _Reader(filesystem.FileSystemReader):
    """torch's, which reads the description once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


class _Part(DefaultLoadPlanner):
    """Loads the part of one tensor at some indices of its first dimensions, into ``target``."""

    def __init__(self, name: str, stored: TensorStorageMetadata, index: Index) -> None:
        super().__init__()
        first = (i if isinstance(i, slice) else slice(i, i + 1) for i in index)
        ranges = [*first, *(slice(0, size) for size in stored.size[len(index) :])]
        self._name, self._stored = name, stored
        self._chunk = ChunkStorageMetadata(
            torch.Size([part.start for part in ranges]),
            torch.Size([part.stop - part.start for part in ranges]),
        )
        self.target = torch.empty(self._chunk.sizes, dtype=stored.properties.dtype)

    def create_local_plan(self) -> LoadPlan:
        items = create_read_items_for_chunk_list(self._name, self._stored, [self._chunk])
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != self.target.numel():
            # torch would leave what is in no file as it was allocated.
            raise ValueError(
                f"{self._name}: {covered} of {self.target.numel()} elements are stored"
            )
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        del index
        return self.target


@contextlib.contextmanager
def _loading(home: Path) -> Iterator[None]:
    """Whatever torch and Megatron raise is one line.

    Raises:
        TTraceError: when Megatron is absent, or they fail.
    """
    with versions.quiet_imports():
        versions.check_supported()
    try:
        with versions.quiet_imports(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            yield
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        # Of an error with a traceback in its text the last line says why.
        reason = f"{type(error).__name__}: {error}".rstrip().splitlines()[-1][:200]
        raise TTraceError(f"{home}: this checkpoint cannot be loaded ({reason})") from error


def _distributed(home: Path) -> Checkpoint:
    is_megatron = (home / _MARK).is_file()
    format = Format.TORCH_DIST if is_megatron else Format.FSDP_DTENSOR
    with _loading(home):
        from megatron.core import dist_checkpointing

        reader = _Reader(home)
        described = reader.read_metadata()
        objects = [k for k, v in described.state_dict_metadata.items() if not hasattr(v, "size")]
        if is_megatron:
            common = dist_checkpointing.load_common_state_dict(str(home))
            common |= _objects(reader, filter(_GROUPS.match, objects))
        else:
            loaded = _objects(reader, (key for key in objects if key.startswith(_NEEDED)))
            common = _nested(loaded, described.planner_data or {})
    tensors: dict[Item, Stored] = {}
    unread: dict[str, Stored] = {}
    for key, value in described.state_dict_metadata.items():
        if not isinstance(value, TensorStorageMetadata) or key.startswith(_NO_STATE):
            continue
        stored = Stored(tuple(value.size), functools.partial(_load, home, reader, key, value))
        if (item := item_of(key, format)) is None:
            unread[key] = dataclasses.replace(stored, padding=_padding(value))
        else:
            tensors[item] = stored
    if not is_megatron:
        tensors = _as_torch_dist(tensors)
    return Checkpoint(format, tensors, numbers=numbers.of_state(common), unread=unread)


def _objects(reader: _Reader, keys: Iterable[str]) -> dict[str, Any]:
    loaded: dict[str, Any] = dict.fromkeys(keys)
    if loaded:
        state_dict_loader.load(loaded, storage_reader=reader, no_dist=True)
    return loaded


def _nested(
    values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]
) -> dict[str, Any]:
    """What torch flattened, as it was."""
    tree: dict[Any, Any] = {}
    for key, value in values.items():
        *parents, leaf = paths.get(key, (key,))
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = value
    return tree


def _as_torch_dist(tensors: Mapping[Item, Stored]) -> dict[Item, Stored]:
    """The tensors of ``fsdp_dtensor`` as ``torch_dist`` has them.

    The halves of gated weights are put together. The model's weights are what the optimizer steps,
    in float32, so they are the main weights as well.
    """
    joined: dict[Item, Stored] = {}
    for item, stored in tensors.items():
        name, end = item.name[:-2], item.name[-2:]
        halves = [tensors.get(dataclasses.replace(item, name=name + half)) for half in _HALVES]
        both = [half for half in halves if half is not None]
        if end not in _HALVES or len(both) < len(_HALVES):
            joined[item] = stored
        elif end == _HALVES[0]:
            joined[dataclasses.replace(item, name=name)] = _stacked(both)
    stepped = {item.name for item in joined if item.state is not State.WEIGHT}
    return joined | {
        dataclasses.replace(item, state=State.MAIN): stored
        for item, stored in joined.items()
        if item.state is State.WEIGHT and item.name in stepped
    }


def _padding(bucket: TensorStorageMetadata) -> tuple[tuple[int, int], ...]:
    """Parameters begin at multiples of 64 (``pad_param_start`` in megatron/core/optimizer).

    Megatron stores what is between them, as it was allocated, in chunks of its own. The part that
    one rank has of a parameter may look like that if it is as short.
    """
    chunks = [(chunk.offsets[0], math.prod(chunk.sizes)) for chunk in bucket.chunks]
    return tuple(
        (start, start + size) for start, size in chunks if 0 < start % _ALIGNED <= _ALIGNED - size
    )


def item_of(key: str, format: Format = Format.TORCH_DIST) -> Item | None:
    """Which tensor a key of a distributed checkpoint names; ``None`` if it has no logical form."""
    is_megatron = format is Format.TORCH_DIST
    key = _CHAINED.sub("", key)
    if match := (_STATE if is_megatron else _STATE_OF_FSDP).fullmatch(key):
        item = state_of(match["slot"], match["name"])
    elif key.startswith("optimizer."):
        return None
    else:
        item = Item(State.WEIGHT, key)
    name = _PREFIX.sub("", item.name)
    return dataclasses.replace(
        item, name=name if is_megatron else _EXPERT_OF_FSDP.sub(_expert, name)
    )


def state_of(slot: str, name: str) -> Item:
    """What an optimizer's state of this name is of a parameter."""
    state = _SLOTS.get(slot, State.OTHER)
    return Item(state, name, slot if state is State.OTHER else "")


def _expert(match: re.Match[str]) -> str:
    """The name of an expert's parameter as in ``torch_dist``."""
    if match["own"]:
        return f".experts.experts.{match['own']}.{match['rest']}"
    return (
        f".experts.experts.{match['number']}.{match['module']}{match['leaf']}{match['half'] or ''}"
    )


def _load(
    home: Path, reader: _Reader, key: str, stored: TensorStorageMetadata, index: Index
) -> torch.Tensor:
    with _loading(home):
        part = _Part(key, stored, index)
        state_dict_loader.load(
            {key: part.target}, storage_reader=reader, planner=part, no_dist=True
        )
    return part.target[tuple(slice(None) if isinstance(i, slice) else 0 for i in index)]


def safetensors_of(folder: Path) -> dict[str, Stored]:
    """The tensors of a model's files, by the names they have there.

    Other safetensors beside them have other formats (``consolidated.safetensors``), or are left
    from an earlier export.

    Raises:
        TTraceError: when a file is missing or damaged.
    """
    names = _named(folder / _INDEX) if (folder / _INDEX).is_file() else {}
    alone = folder / _ALONE
    files = [alone] if alone.is_file() else sorted(folder.glob("*.safetensors"))
    tensors = dict(_safetensors([folder / name for name in sorted(set(names.values()))] or files))
    if absent := names.keys() - tensors.keys():
        raise TTraceError(f"{folder}: {min(absent)} is in {_INDEX}, but in no file")
    return tensors


def _named(index: Path) -> dict[str, str]:
    """The name of its file for each tensor."""
    damage = OSError, ValueError, KeyError, TypeError, AttributeError
    with reported(f"{index} is damaged", *damage):
        names = codec.parse(codec.read(index))["weight_map"]
        if not all(Path(name).name == name for name in names.values()):
            raise ValueError("a file in another directory")
    return dict(names)


def _safetensors(files: Iterable[Path]) -> Iterator[tuple[str, Stored]]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is not a dict
                    shape = tuple(opened.get_slice(name).get_shape())
                    yield name, Stored(shape, functools.partial(_cut, file, name))
        except (OSError, SafetensorError) as error:
            raise TTraceError(f"{file} is damaged ({error})") from error


def _cut(file: Path, name: str, index: Index) -> torch.Tensor:
    with (
        reported(f"{file} is damaged or missing", OSError, SafetensorError),
        safe_open(file, framework="pt") as opened,
    ):
        part: torch.Tensor = opened.get_slice(name)[index] if index else opened.get_tensor(name)
        return part
