# SPDX-License-Identifier: Apache-2.0
"""``verdicts.jsonl`` and ``summary.json``: written whole or not at all, read with clear errors.

Both carry the id of the run that wrote them: each line of verdicts as its last field, the summary
as ``run.id``. The summary also holds the checksum of the verdicts, and of its own bytes
(``trace/sealing.py``). Files of different runs, and damaged ones, are refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.trace import shared
from megatron_ttrace.trace.records import Summary, Verdict
from megatron_ttrace.trace.sealing import (
    CHECKSUM,
    checksum_of,
    checksum_of_file,
    is_sealed,
    open_sealed,
    seal_json,
)

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


def write_verdicts(path: Path, verdicts: Iterable[Verdict], run_id: str | None = None) -> None:
    """One JSON object a line, in the given (execution) order.

    Args:
        path: of the file.
        verdicts: what to write.
        run_id: id of the run; this process's by default.
    """
    run = run_id or shared.run_id()

    def write(file: IO[str]) -> None:
        for verdict in verdicts:
            line = verdict.to_json() | {"run": run}
            file.write(json.dumps(line, allow_nan=False, separators=(",", ":")))
            file.write("\n")

    write_atomically(Path(path), write)


def read_verdicts(path: Path) -> list[Verdict]:
    """The verdicts of a ``verdicts.jsonl``.

    Raises:
        TTraceError: when the file is missing, cut off, not ours, or a mixture of several runs.
    """
    path = Path(path)
    return _verdicts(path, _read(path))[0]


def _verdicts(path: Path, data: bytes) -> tuple[list[Verdict], str | None]:
    """The verdicts in the content of a file, and the id of their run; ``None`` without any."""
    if data and not data.endswith(b"\n"):
        raise TTraceError(f"{path} is cut off (no end of line): run the check again")
    verdicts = []
    run: str | None = None
    for number, text in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            line = json.loads(text)
            verdicts.append(Verdict.from_json(line))
            found = line.get("run")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TTraceError(
                f"{path} line {number} is not a verdict ({_reason(error)}): "
                "give a directory that a check wrote, or run the check again"
            ) from error
        if not isinstance(found, str):
            raise TTraceError(f"{path} was written by an earlier version: run the check again")
        if found != (run := run or found):
            raise TTraceError(f"{path} holds verdicts of several runs: run the check again")
    return verdicts, run


def write_summary(path: Path, summary: Summary, run_id: str | None = None) -> None:
    """``summary.json``, indented for people, with the checksum of the verdicts beside it.

    Args:
        path: of the file; the verdicts must have been written already.
        summary: the answer.
        run_id: id of the run; the summary's own by default, else this process's.
    """
    path = Path(path)
    run = run_id or (summary.run.id if summary.run else shared.run_id())
    content = summary.to_json()
    content["run"] = {**(content["run"] or {}), "id": run}
    verdicts = path.with_name(VERDICTS)
    sealed = {verdicts.name: checksum_of_file(verdicts)[1]} if verdicts.is_file() else {}
    # Whatever JSON does not know becomes text.
    plain = json.loads(json.dumps(strict({**content, "files": sealed}), default=str))
    write_atomically(path, lambda file: put(file, seal_json(plain, indent=2)))


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
        TTraceError: when the file is missing, damaged, or not ours.
    """
    path = Path(path)
    return _summary(path, _read(path))[0]


def _summary(path: Path, data: bytes) -> tuple[Summary, str, str]:
    """The summary in the content of a file, the id of its run, the checksum of its verdicts."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TTraceError(
            f"{path} is cut off or not JSON ({_reason(error)}): run the check again"
        ) from error
    if not isinstance(document, dict) or "verdict" not in document:
        raise TTraceError(
            f"{path} is not a ttrace summary (no field 'verdict'): "
            "give a directory that a check wrote"
        )
    if CHECKSUM not in document:
        raise TTraceError(f"{path} was written by an earlier version: run the check again")
    if not is_sealed(data):
        raise TTraceError(f"{path} is damaged (its checksum does not match): run the check again")
    try:
        run = document["run"]
        identity, verdicts = run["id"], document["files"].get(VERDICTS, "")
        if set(run) == {"id"}:
            document["run"] = None
        summary = Summary.from_json(document)
        sum(summary.counts.values())
        summary.config.items(), summary.versions.items(), summary.timings.items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TTraceError(
            f"{path} is not a ttrace summary ({_reason(error)}): "
            "give a directory that a check wrote"
        ) from error
    return summary, str(identity), str(verdicts)


def load_report(directory: Path | str) -> tuple[Summary, list[Verdict]]:
    """Both files of a finished check.

    Raises:
        TTraceError: when one is missing, damaged, foreign, or does not belong to the other.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise TTraceError(f"{directory} is not a directory: give the --ttrace-dir of a check")
    path = directory / VERDICTS
    summary, run, sealed = _summary(directory / SUMMARY, _read(directory / SUMMARY))
    data = _read(path)
    verdicts, found = _verdicts(path, data)
    if reason := summary.disagreement(verdicts):
        raise TTraceError(
            f"{path} and {SUMMARY} disagree ({reason}): "
            "one of them is cut off or from another run; run the check again"
        )
    if found not in (None, run):
        raise TTraceError(
            f"{path} and {SUMMARY} are of different runs ({found} and {run}): run the check again"
        )
    if checksum_of(data) != sealed:
        raise TTraceError(f"{path} is damaged (its checksum does not match): run the check again")
    saved = _run_of_candidate(directory)
    if saved not in (None, run):
        raise TTraceError(
            f"{directory} holds the report of run {run} and the candidate of run {saved}: "
            "run the check again"
        )
    return summary, verdicts


def run_of(directory: Path | str) -> str:
    """The id of the run that wrote a report. Raises as :func:`load_report` does."""
    path = Path(directory) / SUMMARY
    return _summary(path, _read(path))[1]


def _run_of_candidate(directory: Path) -> str | None:
    """The run that saved the candidate beside a report, if there is one that can be read."""
    try:
        run = open_sealed((directory / "candidate" / "meta.json").read_bytes()).get("run")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return run if isinstance(run, str) else None


def answer_of(directory: Path, run_id: str) -> Summary:
    """The summary of one particular run, after verifying that its verdicts are complete.

    Raises:
        TTraceError: when there is none, it is damaged, or of another run.
    """
    path = directory / SUMMARY
    summary, run, sealed = _summary(path, _read(path))
    if run != run_id:
        raise TTraceError(f"{path} is of another run ({run}, not {run_id}): run the check again")
    verdicts = directory / VERDICTS
    try:
        digest = checksum_of_file(verdicts)[1]
    except OSError as error:
        raise TTraceError(f"cannot read {verdicts}: {error.strerror or error}") from error
    if digest != sealed:
        raise TTraceError(
            f"{verdicts} is damaged (its checksum does not match): run the check again"
        )
    return summary


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
