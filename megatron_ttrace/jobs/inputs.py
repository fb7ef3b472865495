# SPDX-License-Identifier: Apache-2.0
"""Refuse pipes and devices as input files: opening one can block forever."""

from collections.abc import Iterable
from pathlib import Path

from megatron_ttrace.trace.errors import TTraceError

_DATA_FLAGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_FILE_FLAGS = (
    *("data_args_path", "per_split_data_args_path", "vocab_file", "merge_file"),
    *("tokenizer_model", "tiktoken_pattern", "per_dataset_sequences_path"),
)


def require_regular(paths: Iterable[Path]) -> None:
    """Refuse pipes, sockets and devices with a ``TTraceError`` that names the first of them.

    Folders and missing files are reported elsewhere.
    """
    for path in paths:
        try:
            special = path.exists() and not path.is_file() and not path.is_dir()
        except (OSError, ValueError):
            continue
        if special:
            raise TTraceError(
                f"{path} is a pipe, a socket or a device, not a regular file: give a copy of it"
            )


def require_regular_folder(folder: Path) -> None:
    """The same for the files directly in a folder."""
    require_regular([folder])
    try:
        require_regular(sorted(folder.iterdir()))
    except OSError:
        return


def require_regular_data(args: object) -> None:
    """The same for the data that Megatron's arguments name."""
    # The weights between the prefixes of a blend do not exist as files.
    prefixes = [prefix for flag in _DATA_FLAGS for prefix in getattr(args, flag, None) or ()]
    names = [f"{prefix}{suffix}" for prefix in prefixes for suffix in ("", ".bin", ".idx")]
    values = (getattr(args, flag, None) for flag in _FILE_FLAGS)
    names += [value for value in values if isinstance(value, str)]
    require_regular(map(Path, names))
