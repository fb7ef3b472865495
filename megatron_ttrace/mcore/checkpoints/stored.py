# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint: names, shapes, and how to read them.

Formats: Megatron's distributed checkpoint (``--ckpt-format torch_dist``), whose names and shapes do
not depend on the layout, and safetensors, as exported for other programs. A distributed checkpoint
is described by a pickle, which nothing here reads: Megatron loads it, as it does when it trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ttrace.mcore import versions
from megatron_ttrace.mcore.quiet import changed
from megatron_ttrace.trace import small_files
from megatron_ttrace.trace.errors import TTraceError

_DESCRIPTION = ".metadata"
_MARK = "metadata.json"
"""Megatron's own, beside PyTorch's description, in ``torch_dist`` only."""
_LATEST = "latest_checkpointed_iteration.txt"
_OTHERS = ("optimizer.", "rng_state", "rerun_state_machine", "opt_param_scheduler", "chained_")
"""Beginnings of the names of what is not a weight."""
_PREFIX = re.compile(r"^(?:model\d*\.)?(?:module\.)*")


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A weight.

    Attributes:
        shape: of the whole weight.
        read: returns it, or one index of its first dimension. Raises ``TTraceError`` when it is
            missing or damaged.
    """

    shape: tuple[int, ...]
    read: Callable[[int | None], torch.Tensor]


def weights(folder: Path) -> dict[str, Stored]:
    """The weights of a checkpoint.

    Args:
        folder: of one iteration, or with several of them, of which the latest counts.

    Raises:
        TTraceError: when there is no checkpoint in a format that is read.
    """
    home = _of_iteration(folder)
    if (home / _MARK).is_file():
        found = _distributed(home)
    elif files := sorted(home.glob("*.safetensors")):
        found = dict(_safetensors(files))
    elif (home / _DESCRIPTION).is_file():
        raise TTraceError(
            f"{home} has no {_MARK}, so it is not in the format torch_dist. Formats that are "
            "read: torch_dist, safetensors (fsdp_dtensor: export it)"
        )
    elif next(home.rglob("*.pt"), None) is not None:
        raise TTraceError(
            f"{home} is in Megatron's format torch, which is pickles: convert it with "
            "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"
        )
    else:
        raise TTraceError(f"{folder} holds no checkpoint: neither {_MARK} nor *.safetensors")
    if not found:
        raise TTraceError(f"{home} holds no weights")
    return found


def _of_iteration(folder: Path) -> Path:
    if not folder.is_dir():
        raise TTraceError(f"{folder}: no such directory")
    latest = folder / _LATEST
    if not latest.is_file():
        return folder
    try:
        text = small_files.text(latest).strip()
    except (OSError, ValueError) as error:
        raise TTraceError(f"{latest} cannot be read: {error}") from error
    number = int(text) if re.fullmatch("[0-9]{1,18}", text) else None
    home = folder / ("release" if number is None else f"iter_{number:07d}")
    if not home.is_dir():
        raise TTraceError(f"{latest} names {home.name}, which does not exist")
    return home


def _distributed(home: Path) -> dict[str, Stored]:
    with _loading(home) as megatron, _without_strides():
        described = megatron.load_tensors_metadata(str(home))
    return {
        _PREFIX.sub("", name): Stored(
            tuple(one.global_shape), functools.partial(_load, home, name, one)
        )
        for name, one in described.items()
        if not name.startswith(_OTHERS)
    }


def _load(home: Path, name: str, described: Any, index: int | None) -> torch.Tensor:
    """A tensor by Megatron's loader, on one rank."""
    shape = tuple(described.global_shape)
    with _loading(home) as megatron:
        if index is None:
            wanted = megatron.ShardedTensor.from_rank_offsets(
                name, torch.empty(shape, dtype=described.dtype)
            )
        else:
            part = torch.empty((1, *shape[1:]), dtype=described.dtype)
            wanted = megatron.ShardedTensor.from_rank_offsets(name, part, (0, index, shape[0]))
        loaded = megatron.load({name: wanted}, str(home), validate_access_integrity=False)
    found: torch.Tensor = loaded[name]
    return found if index is None else found[0]


@contextlib.contextmanager
def _loading(home: Path) -> Iterator[Any]:
    """``megatron.core.dist_checkpointing`` in a process that is the only rank.

    Raises:
        TTraceError: when Megatron is absent, or fails.
    """
    with versions.quiet_imports():
        versions.check_supported()
    try:
        with versions.quiet_imports():
            from megatron.core import dist_checkpointing

            if not distributed.is_initialized():
                store = distributed.HashStore()  # type: ignore[attr-defined]
                distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            yield dist_checkpointing
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        # Of an error with a traceback in its text the last line says why.
        reason = f"{type(error).__name__}: {error}".rstrip().splitlines()[-1][:200]
        raise TTraceError(f"{home}: Megatron cannot load this checkpoint ({reason})") from error


def _without_strides() -> contextlib.AbstractContextManager[None]:
    """PyTorch 2.15 describes strides, too, and Megatron hands all of it to ``torch.empty``."""
    empty = torch.empty

    def without(*args: Any, strides: object = None, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    return changed([(torch, "empty", without)])


def _safetensors(files: list[Path]) -> Iterator[tuple[str, Stored]]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is not a dict
                    shape = tuple(opened.get_slice(name).get_shape())
                    yield _PREFIX.sub("", name), Stored(shape, functools.partial(_cut, file, name))
        except (OSError, SafetensorError) as error:
            raise TTraceError(f"{file} is damaged ({error})") from error


def _cut(file: Path, name: str, index: int | None) -> torch.Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            if index is None:
                found: torch.Tensor = opened.get_tensor(name)
            else:
                found = opened.get_slice(name)[index : index + 1][0]
    except (OSError, SafetensorError) as error:
        raise TTraceError(f"{file} is damaged or missing ({error})") from error
    return found
