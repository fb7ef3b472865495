# SPDX-License-Identifier: Apache-2.0
"""Which Megatron-Bridge is installed, and whether it has what its front wraps. It is not imported.

An import takes ten seconds, and fails without TransformerEngine.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

TESTED = ("0.6.2",)
"""Releases."""

_NEEDED = {
    "training/pretrain.py": ("runtime_config_update", "setup"),
    "training/setup.py": (
        *("_build_distributed_model", "checkpoint_exists", "_load_checkpoint_from_path"),
    ),
    "training/config.py": ("GPTDatasetConfig", "GPTSFTDatasetConfig"),
    "training/mixed_precision.py": ("get_mixed_precision_config", "MixedPrecisionConfig"),
    "training/train.py": ("train_step", "force_param_sync"),
    "training/utils/train_utils.py": ("training_log", "calc_params_l2_norm"),
    "data/batch_utils.py": ("split_batch_into_microbatches",),
    "data/samplers.py": ("MegatronPretrainingRandomSampler",),
}
"""Names that ``bridge.py`` and ``bridge_small.py`` use, by file."""


def folder() -> Path | None:
    """Where the package is; ``None`` if it is not installed."""
    try:
        spec = importlib.util.find_spec("megatron.bridge")
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def version() -> str:
    """The installed release; empty if its metadata is missing."""
    try:
        return importlib.metadata.version("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        return ""


def lacking(home: Path) -> list[str]:
    """What the front needs and a package does not have, as ``file: name``."""
    return [
        f"{file}: {name}"
        for file, names in _NEEDED.items()
        for name in names
        if name not in _names(home / file)
    ]


def _names(file: Path) -> set[str]:
    """What a module defines or imports at its top level."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return set()
    defined: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            defined |= {name.asname or name.name for name in node.names}
    return defined
