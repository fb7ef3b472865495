# SPDX-License-Identifier: Apache-2.0
"""Refuse pipes and devices as input files: opening one can block forever."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_ttrace.trace.errors import TTraceError

_DATA_FLAGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_FILE_FLAGS = (
    *("data_args_path", "per_split_data_args_path", "vocab_file", "merge_file"),
    *("tokenizer_model", "tiktoken_pattern", "per_dataset_sequences_path"),
)


def require_regular(paths: Iterable[Path]) -> None:
    """Refuse pipes, sockets and devices. Folders and missing files are reported elsewhere.

    Raises:
        TTraceError: naming the first of them.
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
    """The same for the files directly in a folder.

    Raises:
        TTraceError: naming the first special file.
    """
    require_regular([folder])
    try:
        require_regular(sorted(folder.iterdir()))
    except OSError:
        return


def require_regular_data(args: object) -> None:
    """The same for the data that Megatron's arguments name.

    Raises:
        TTraceError: naming the first special file.
    """
    require_regular(_data_files(args))


def _data_files(args: object) -> Iterator[Path]:
    for flag in _DATA_FLAGS:
        # The weights between the prefixes of a blend do not exist as files.
        for prefix in map(str, getattr(args, flag, None) or ()):
            yield from (Path(prefix), Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    for flag in _FILE_FLAGS:
        value = getattr(args, flag, None)
        if isinstance(value, str):
            yield Path(value)
