# SPDX-License-Identifier: Apache-2.0
"""Refuse pipes and devices as input files: opening one can block forever."""

import json
from collections.abc import Iterable
from pathlib import Path

from megatron_ttrace.trace.errors import TTraceError

_DATA_FLAGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_DATA_LISTS = ("data_args_path", "per_split_data_args_path")
_FILE_FLAGS = (
    *("vocab_file", "merge_file", "tokenizer_model", "tiktoken_pattern"),
    "per_dataset_sequences_path",
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


def require_regular_data(args: object) -> None:
    """The same for the data that Megatron's arguments name."""
    require_regular(map(Path, _named(args, (*_DATA_LISTS, *_FILE_FLAGS))))
    require_regular(of_data(args))


def of_data(args: object) -> list[Path]:
    """Files of data and tokenizers that Megatron's arguments, or their lists of data, name.

    Not all exist: blends have weights, and a tokenizer may be a name or a folder.
    """
    # The weights between the prefixes of a blend do not exist as files.
    prefixes = [prefix for flag in _DATA_FLAGS for prefix in getattr(args, flag, None) or ()]
    lists = _named(args, _DATA_LISTS)
    prefixes += [word for file in lists for word in _words(Path(file))]
    names = [f"{prefix}{suffix}" for prefix in prefixes for suffix in ("", ".bin", ".idx")]
    return [Path(name) for name in (*names, *lists, *_named(args, _FILE_FLAGS))]


def _named(args: object, flags: Iterable[str]) -> list[str]:
    values = (getattr(args, flag, None) for flag in flags)
    return [value for value in values if isinstance(value, str)]


def _words(file: Path) -> list[str]:
    """What a list of data names: words, or in JSON those of each split."""
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if text.lstrip().startswith("{") else {"": text}
    except (OSError, ValueError):
        return []  # Megatron reports the reason
    lists = [words.split() if isinstance(words, str) else words for words in content.values()]
    return [str(word) for words in lists if isinstance(words, list) for word in words]
