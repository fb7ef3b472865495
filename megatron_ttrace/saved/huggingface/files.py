# SPDX-License-Identifier: Apache-2.0
"""The directory of a model of Hugging Face: ``config.json`` and safetensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from megatron_ttrace.mcore.checkpoints.stored import Stored, safetensors
from megatron_ttrace.saved.huggingface import families
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import TTraceError

_CONFIG, _INDEX, _ALONE = "config.json", "model.safetensors.index.json", "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Files:
    """A model's directory.

    Attributes:
        folder: of the files.
        config: the model's.
        family: of the model.
        tensors: by name; read when they are asked for.
    """

    folder: Path
    config: families.Config
    family: families.Family
    tensors: Mapping[str, Stored]


def is_model(folder: Path) -> bool:
    """Whether a directory holds a model's config and safetensors."""
    return (folder / _CONFIG).is_file() and next(folder.glob("*.safetensors"), None) is not None


def open_files(folder: Path) -> Files:
    """A model's directory.

    Raises:
        TTraceError: when the family is not supported, or a file is missing or damaged.
    """
    config = families.read_config(folder / _CONFIG)
    family = families.family_of(config, weights_only=True)
    # Other safetensors beside the model's have other formats (consolidated.safetensors).
    names = _named(folder / _INDEX) if (folder / _INDEX).is_file() else {}
    alone = (
        [folder / _ALONE] if (folder / _ALONE).is_file() else sorted(folder.glob("*.safetensors"))
    )
    tensors = dict(safetensors([folder / name for name in sorted(set(names.values()))] or alone))
    if absent := names.keys() - tensors.keys():
        raise TTraceError(f"{folder}: {min(absent)} is in {_INDEX}, but in no file")
    return Files(folder, config, family, tensors)


def _named(index: Path) -> dict[str, str]:
    """The name of its file for each tensor."""
    try:
        names = codec.parse(codec.read(index))["weight_map"]
        if not all(Path(name).name == name for name in names.values()):
            raise ValueError("a file in another directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TTraceError(f"{index} is damaged ({error})") from error
    return dict(names)
