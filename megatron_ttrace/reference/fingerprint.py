# SPDX-License-Identifier: Apache-2.0
"""The identity of a reference: arguments, data, code and versions that its numbers depend on.

Two candidates whose layouts differ share a reference when this agrees. What is not known to be
harmless counts: a needless new reference costs seconds, a stale one a false verdict.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ttrace import versions
from megatron_ttrace.flags import Settings
from megatron_ttrace.reference.arguments import QUIET, SINGLE_DEVICE, overrides_of

_HARMLESS_PREFIXES = (
    "ttrace",
    "log_",
    "tensorboard_",
    "wandb_",
    "save",
    "exit_",
    "eval_",
    "timing_",
    "distributed_",
    "profile",
    "inprocess_",
    "ckpt_",
    "dist_ckpt_",
    "non_persistent_",
    "straggler_",
    "one_logger",
    "ft_",
)
_HARMLESS = {
    "rank",
    "local_rank",
    "world_size",
    "data_parallel_size",
    "transformer_pipeline_model_parallel_size",
    "num_workers",
    "enable_one_logger",
    "use_dist_ckpt",
    "data_cache_path",
    "consumed_train_samples",
    "consumed_valid_samples",
    "align_param_gather",
    "align_grad_reduce",
    "variable_seq_lengths",
    "padded_vocab_size",
    "iteration",
    "curr_iteration",
    "model_type",
    "num_floating_point_operations_so_far",
}


def identity(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Everything the reference of this candidate depends on, as JSON values."""
    derived = {**vars(args), **SINGLE_DEVICE, **QUIET, **overrides_of(args)}
    arguments = {
        name: _plain(value)
        for name, value in sorted(derived.items())
        if name not in _HARMLESS
        and not name.startswith(_HARMLESS_PREFIXES)
        and name not in SINGLE_DEVICE
        and name not in QUIET
    }
    return {
        "arguments": arguments,
        "ttrace": {
            "iterations": list(settings.iterations),
            "init": settings.init,
            "seeds": settings.seeds,
            "reference_args": settings.reference_args,
            "device": _device(),
        },
        "data": _data(args),
        "code": {
            "script": _content([Path(sys.argv[0])]),
            "megatron_ttrace": _content(_sources("megatron_ttrace")),
            "megatron": _stamps(_sources("megatron.core"), _sources("megatron.training")),
        },
        "versions": versions.installed(),
    }


def digest(identity_: dict[str, Any]) -> str:
    """A short name for an identity."""
    text = json.dumps(identity_, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What tells two identities apart, in words, most telling first."""
    found = []
    for part in ("arguments", "ttrace", "data", "start", "versions", "code"):
        here, there = ours.get(part) or {}, theirs.get(part) or {}
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                found.append(f"{name} is {here.get(name)!r} here and {there.get(name)!r} there")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    text = str(value)
    # An object that prints its address has no value that could be compared.
    return type(value).__name__ if " at 0x" in text else text


def _device() -> str:
    from megatron_ttrace import cpu

    if cpu.active():
        return "cpu"
    import torch

    return torch.cuda.get_device_name()


def _data(args: argparse.Namespace) -> dict[str, Any]:
    """Sizes and times of the data files: their content is too large to read."""
    stamps: dict[str, Any] = {}
    for name in ("data_path", "train_data_path"):
        for word in getattr(args, name, None) or []:
            for suffix in (".bin", ".idx"):
                path = Path(f"{word}{suffix}")
                if path.is_file():
                    stat = path.stat()
                    stamps[str(path)] = [stat.st_size, stat.st_mtime_ns]
    return stamps


def _sources(package: str) -> list[Path]:
    import importlib.util

    spec = importlib.util.find_spec(package)
    roots = list(spec.submodule_search_locations or []) if spec else []
    return sorted(path for root in roots for path in Path(root).rglob("*.py"))


def _content(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        if path.is_file():
            total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:16]


def _stamps(*groups: list[Path]) -> str:
    total = hashlib.sha256()
    for path in (path for group in groups for path in group):
        stat = path.stat()
        total.update(f"{path}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return total.hexdigest()[:16]
