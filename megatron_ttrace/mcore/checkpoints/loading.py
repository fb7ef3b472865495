# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a job starts from: whether there is one, and its weights on one device."""

import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from megatron_ttrace.mcore import fronts
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.replaced import kept
from megatron_ttrace.trace.errors import one_line

_LONGEST = 120
NAME = "iter_{:07d}"
TRACKER = "latest_checkpointed_iteration.txt"


class Part(StrEnum):
    """What a job may load from a checkpoint besides weights."""

    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    SCHEDULE = "schedule"
    """The scheduler's settings, without its position."""
    POSITION = "position"
    """The iteration and the samples that were consumed."""
    RANDOM = "random"


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that a candidate has loaded.

    Attributes:
        directory: of its iterations.
        iteration: the one that was loaded; ``None`` for a release, or if it is not known.
        format: Megatron's ``--ckpt-format``.
        files: a digest of its files' names, sizes and dates.
        why_not: why one device cannot load the same; empty if that can be tried.
        left: what the job does not load by its user's choice, and the option that says so.
    """

    directory: str
    iteration: int | None
    format: str
    files: str
    why_not: str = ""
    left: tuple[tuple[Part, str], ...] = ()

    @property
    def folder(self) -> Path:
        """Of the iteration that was loaded."""
        if self.iteration is not None:
            return Path(self.directory, NAME.format(self.iteration))
        release = Path(self.directory, "release")
        return release if release.is_dir() else Path(self.directory)

    def loads(self, part: Part) -> bool:
        """Whether the job loads this part, if the checkpoint has it."""
        return all(part is not left for left, _ in self.left)


def directory_of(args: MegatronArguments) -> str | None:
    """The directory that Megatron loads from (``load_checkpoint``); ``None`` without one."""
    for path in (args.load, getattr(args, "pretrained_checkpoint", None)):
        if path is not None and not _flaw(path, args):
            return str(path)
    return None


def loads_optimizer(args: MegatronArguments) -> bool:
    """Whether this job loads its optimizer's state, if the checkpoint has it."""
    # A pretrained checkpoint is loaded as with --finetune.
    is_load = args.load is not None and directory_of(args) == str(args.load)
    return is_load and all(part is not Part.OPTIMIZER for part, _ in _left(args, is_release=False))


def missing(args: MegatronArguments) -> str:
    """Why nothing is loaded although the job names a checkpoint; empty if that is not so.

    Megatron then starts from random weights.
    """
    load, pretrained = args.load, getattr(args, "pretrained_checkpoint", None)
    # Those have directories of their own, and names that only Megatron knows.
    if getattr(args, "non_persistent_ckpt_type", None) or directory_of(args):
        return ""
    if pretrained is not None:
        return f"--pretrained-checkpoint {pretrained} {_flaw(pretrained, args)}"
    return f"--load {load} {_flaw(load, args)}" if load is not None else ""


def is_first_start(args: MegatronArguments) -> bool:
    """Whether the job loads what it will save: the first time there is nothing yet."""
    save = getattr(args, "save", None)
    if args.load is None or save is None or getattr(args, "ckpt_step", None):
        return False
    return os.path.realpath(str(args.load)) == os.path.realpath(str(save))


def _flaw(path: str, args: MegatronArguments) -> str:
    """Why there is no checkpoint to load in a directory; empty if there is."""
    from megatron.training.checkpointing import checkpoint_exists

    step = getattr(args, "ckpt_step", None)
    if "://" in str(path):
        return "" if step or checkpoint_exists(path) else "has no checkpoint"
    home = Path(path)
    try:
        names = os.listdir(home)
        if step:
            iteration = NAME.format(step)
            return "" if iteration in names else f"has no iteration {step} ({iteration})"
        if TRACKER not in names:
            if not {*fronts.current().marks}.isdisjoint(names):
                return ""
            return f"has no checkpoint ({TRACKER} is missing)"
        (home / TRACKER).read_bytes()
    except FileNotFoundError:
        return "does not exist"
    except NotADirectoryError:
        return "is not a directory"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return ""


def source_of(args: MegatronArguments) -> Source | None:
    """The checkpoint that this job has loaded; ``None`` without one."""
    directory = directory_of(args)
    if directory is None:
        return None
    why_not = ""
    if getattr(args, "non_persistent_ckpt_type", None):
        why_not = "--non-persistent-ckpt-type: it may not be the one that was loaded"
    elif getattr(args, "moe_use_upcycling", False):
        why_not = "--moe-use-upcycling: its weights become those of experts"
    elif any(getattr(args, name, False) for name in ("fp8_param_gather", "fp4_param_gather")):
        why_not = "weights that are kept in few bits have a scale on each rank"
    # Megatron's own ``read_metadata`` is a collective, and this is asked on one rank.
    latest = ""
    with contextlib.suppress(FileNotFoundError):
        latest = Path(directory, TRACKER).read_text(encoding="utf-8").strip()
    number = str(getattr(args, "ckpt_step", None) or latest)
    iteration = int(number) if number.isdecimal() else None
    source = Source(
        str(Path(directory).absolute()),
        iteration,
        str(getattr(args, "ckpt_format", "torch")),
        files="",
        why_not=why_not,
        left=tuple(_left(args, is_release=iteration is None and bool(latest))),
    )
    marks = hashlib.sha256()
    for path in sorted(source.folder.rglob("*")):
        with contextlib.suppress(OSError):
            status = path.stat()
            marks.update(f"{path.name}/{status.st_size}/{status.st_mtime_ns};".encode())
    return dataclasses.replace(source, files=marks.hexdigest())


def _left(args: MegatronArguments, *, is_release: bool) -> Iterator[tuple[Part, str]]:
    """What Megatron does not load (``load_checkpoint`` in megatron/training/checkpointing.py)."""
    nothing = "a release" if is_release else "--finetune" if getattr(args, "finetune", 0) else ""
    without = nothing or ("--no-load-optim" if getattr(args, "no_load_optim", None) else "")
    if without:
        yield from ((part, without) for part in (Part.OPTIMIZER, Part.SCHEDULER, Part.SCHEDULE))
    elif getattr(args, "override_opt_param_scheduler", False):
        yield Part.SCHEDULE, "--override-opt_param-scheduler"
    if nothing:
        yield Part.POSITION, nothing
    elif getattr(args, "override_ckpt_iteration", None) is not None:
        yield Part.POSITION, "--override-ckpt-iteration"
    if nothing or getattr(args, "no_load_rng", None):
        yield Part.RANDOM, nothing or "--no-load-rng"


def load_weights(
    source: Source,
    chunks: Sequence[torch.nn.Module],
    weights: Iterable[torch.Tensor],
    args: MegatronArguments,
) -> str:
    """Let Megatron load a checkpoint into the model of a job of one device, without its optimizer.

    ``weights`` are the model's; those that are not in the checkpoint become NaN.

    Returns:
        Why it could not be loaded; empty when it was.
    """
    if why_not := source.why_not or fronts.current().unloaded:
        return why_not
    from megatron.training import checkpointing

    with torch.no_grad():
        for weight in weights:
            weight.fill_(math.nan)
    options = {
        "load": source.directory,
        "ckpt_step": source.iteration,
        "ckpt_format": source.format,
        "pretrained_checkpoint": None,
        "finetune": True,
        "no_load_optim": True,
        "no_load_rng": True,
        "exit_on_missing_checkpoint": False,
    }
    load: Any = checkpointing.load_checkpoint
    try:
        with kept(vars(args)):
            vars(args).update(options)
            load(list(chunks), None, None)
    except SystemExit:
        return "Megatron ended the process: the reason is in the reference's log"
    except Exception as error:  # noqa: BLE001 - whatever a format that does not reshard raises
        return f"Megatron: {one_line(error)[:_LONGEST]}"
    return ""
