# SPDX-License-Identifier: Apache-2.0
"""``verdicts.jsonl`` and ``summary.json``: written whole or not at all, read with clear errors."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.records import Summary, Verdict

VERDICTS = "verdicts.jsonl"
SUMMARY = "summary.json"
HTML = "report.html"
JUNIT = "junit.xml"


def write_atomically(path: Path, write: Callable[[IO[str]], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path`` and move it there when complete.

    A reader, or a job killed by its scheduler, never sees half a file.

    Raises:
        TTraceError: when the directory cannot be written.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise TTraceError(
            f"cannot write {path}: {error.strerror or error}; choose another --ttrace-dir"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file that is about to be written anew.

    Raises:
        TTraceError: when it is there and cannot be removed.
    """
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise TTraceError(
            f"cannot replace {path}: {error.strerror or error}; choose another --ttrace-dir"
        ) from error


def _umask() -> int:
    """The process's mask, which ``mkstemp`` ignores; reports are for others to read too."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_verdicts(path: Path, verdicts: Iterable[Verdict]) -> None:
    """One JSON object a line, in the given (execution) order."""

    def write(file: IO[str]) -> None:
        for verdict in verdicts:
            file.write(json.dumps(verdict.to_json(), allow_nan=False, separators=(",", ":")))
            file.write("\n")

    write_atomically(Path(path), write)


def read_verdicts(path: Path) -> list[Verdict]:
    """The verdicts of a ``verdicts.jsonl``.

    Raises:
        TTraceError: when the file is missing, cut off, or not ours.
    """
    path = Path(path)
    data = _read(path)
    if data and not data.endswith(b"\n"):
        raise TTraceError(f"{path} is cut off (no end of line): run the check again")
    verdicts = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            verdicts.append(Verdict.from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TTraceError(
                f"{path} line {number} is not a verdict ({_reason(error)}): "
                "give a directory that a check wrote, or run the check again"
            ) from error
    return verdicts


def write_summary(path: Path, summary: Summary) -> None:
    """``summary.json``, indented for people."""
    text = json.dumps(strict(summary.to_json()), indent=2, allow_nan=False, default=str)
    write_atomically(Path(path), lambda file: put(file, text + "\n"))


def put(file: IO[str], text: str) -> None:
    """Write ``text`` as it is; the callback of :func:`write_atomically`."""
    file.write(text)


def strict(value: Any) -> Any:
    """A copy that is strict JSON whatever the configuration holds: other programs read it."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value


def read_summary(path: Path) -> Summary:
    """The summary of a check.

    Raises:
        TTraceError: when the file is missing, cut off, or not ours.
    """
    path = Path(path)
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise TTraceError(
            f"{path} is cut off or not JSON ({_reason(error)}): run the check again"
        ) from error
    try:
        summary = Summary.from_json(data)
        sum(summary.counts.values())
        summary.config.items(), summary.versions.items(), summary.timings.items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TTraceError(
            f"{path} is not a ttrace summary ({_reason(error)}): "
            "give a directory that a check wrote"
        ) from error
    return summary


def load_report(directory: Path | str) -> tuple[Summary, list[Verdict]]:
    """Both files of a finished check.

    Raises:
        TTraceError: when one is missing, cut off, foreign, or does not belong to the other.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise TTraceError(f"{directory} is not a directory: give the --ttrace-dir of a check")
    summary = read_summary(directory / SUMMARY)
    verdicts = read_verdicts(directory / VERDICTS)
    counted = sum(summary.counts.values())
    if summary.counts and counted != len(verdicts):
        raise TTraceError(
            f"{directory / VERDICTS} holds {len(verdicts)} verdicts but {SUMMARY} counts "
            f"{counted}: "
            "one of them is cut off or from another run; run the check again"
        )
    return summary, verdicts


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise TTraceError(
            f"{path} does not exist: give the --ttrace-dir of a finished check"
        ) from error
    except OSError as error:
        raise TTraceError(f"cannot read {path}: {error.strerror or error}") from error


def _reason(error: BaseException) -> str:
    """A short cause: a missing field is named, long parser messages are cut."""
    if isinstance(error, KeyError):
        return f"no field {error.args[0]!r}"
    return str(error).splitlines()[0][:80] if str(error) else type(error).__name__
