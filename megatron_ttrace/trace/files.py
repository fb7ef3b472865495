# SPDX-License-Identifier: Apache-2.0
"""``verdicts.jsonl`` and ``summary.json``: written whole or not at all, read with clear errors.

Both carry the id of the run that wrote them: each line of verdicts as its last field, the summary
as ``run.id``. The summary also holds the checksum of the verdicts, and of its own bytes
(``trace/sealing.py``), so files of different runs, and damaged ones, are refused.
"""

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from megatron_ttrace.trace import codec, owned, shared
from megatron_ttrace.trace.codec import Record
from megatron_ttrace.trace.errors import TTraceError, brief, reported
from megatron_ttrace.trace.records import Summary, Verdict
from megatron_ttrace.trace.sealing import (
    checksum_of,
    checksum_of_file,
    is_sealed,
    open_sealed,
    seal_json,
)

VERDICTS = "verdicts.jsonl"
SUMMARY = "summary.json"
COLLECTIVES = "collectives.jsonl"
HTML = "report.html"

_MOST_BYTES = 1 << 34
_AGAIN = "run the check again"
_DIRECTORY = "give a directory that a check wrote"


def write_atomically(path: Path, pieces: Iterable[str], *, sealed: bool = True) -> None:
    """Write a whole file of ours and its directory (:func:`owned.write`). Raises ``TTraceError``.

    ``sealed``: a file that was changed since is not replaced.
    """
    with _writing(path):
        owned.make(path.parent, ignored=True)
        owned.write(path, pieces, sealed=sealed)


def write_named(path: Path, text: str) -> None:
    """Write a file that the user named, whatever it was before. Raises ``TTraceError``."""
    with reported(f"{path} cannot be written", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        owned.replace_named(path, text.encode())


def remove(path: Path) -> None:
    """Remove a file of ours, if there is one. Raises ``TTraceError``."""
    with _writing(path):
        owned.remove(path)


def _writing(path: Path) -> AbstractContextManager[None]:
    return reported(f"{path} cannot be written", OSError, advice="choose another directory")


def write_records(path: Path, records: Iterable[Record], run_id: str | None = None) -> None:
    """Verdicts, or collectives: one JSON object per line, in the given (execution) order.

    Each has the id of the run, by default this process's.
    """
    run = {"run": run_id or shared.run_id()}
    encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
    write_atomically(path, (encoder.encode(record.to_json() | run) + "\n" for record in records))


def write_summary(path: Path, summary: Summary, run_id: str | None = None) -> None:
    """``summary.json``, indented for people, with the checksum of the verdicts beside it.

    ``run_id`` is by default the summary's own, else this process's.
    """
    run = run_id or (summary.run.id if summary.run else shared.run_id())
    content = summary.to_json()
    content["run"] = {**(content["run"] or {}), "id": run}
    files = (path.with_name(name) for name in (VERDICTS, COLLECTIVES))
    sealed = {file.name: checksum_of_file(file)[1] for file in files if file.is_file()}
    # Whatever JSON does not know becomes text.
    plain = json.loads(json.dumps({**content, "files": sealed}, default=str))
    write_atomically(path, [seal_json(plain, indent=2)])


class _Sealed(NamedTuple):
    """The content of a ``summary.json``."""

    summary: Summary
    run: str
    verdicts: str
    """Checksum of the verdicts."""


def load_report(directory: Path | str) -> tuple[Summary, list[Verdict]]:
    """Both files of a finished check.

    Raises ``TTraceError`` when one is missing, damaged, foreign, or does not belong to the other.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise TTraceError(f"{directory} is not a directory: give the --ttrace-dir of a check")
    path = directory / VERDICTS
    sealed = _summary(directory)
    data = _read(path)
    if checksum_of(data) != sealed.verdicts:
        raise _damaged(path)
    verdicts = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            verdicts.append(Verdict.from_json(json.loads(line)))
        except (ValueError, RecursionError) as error:
            reason = f"line {number} is not a verdict ({brief(error)})"
            raise TTraceError(f"{path} {reason}: {_DIRECTORY}, or {_AGAIN}") from error
    if reason := sealed.summary.disagreement(verdicts):
        raise TTraceError(f"{path} and {SUMMARY} disagree ({reason}): {_AGAIN}")
    run = _run_of_candidate(directory)
    if run not in (None, sealed.run):
        raise TTraceError(
            f"{directory} holds the report of run {sealed.run} and the candidate of run {run}: "
            f"{_AGAIN}"
        )
    return sealed.summary, verdicts


def run_of(directory: Path | str) -> str:
    """The id of the run that wrote a report. Raises as :func:`load_report` does."""
    return _summary(Path(directory)).run


def answer_of(directory: Path, run_id: str) -> Summary:
    """The summary of one particular run, if its verdicts are complete. Raises ``TTraceError``."""
    sealed = _summary(directory)
    if sealed.run != run_id:
        path = directory / SUMMARY
        raise TTraceError(f"{path} is of a different run ({sealed.run}, not {run_id}): {_AGAIN}")
    verdicts = directory / VERDICTS
    with reported(f"{verdicts} cannot be read", OSError):
        digest = checksum_of_file(verdicts)[1]
    if digest != sealed.verdicts:
        raise _damaged(verdicts)
    return sealed.summary


def _summary(directory: Path) -> _Sealed:
    path = directory / SUMMARY
    data = _read(path)
    what = f"{path} is cut off or not JSON"
    with reported(what, ValueError, RecursionError, advice=_AGAIN):
        document = json.loads(data)
    what, kinds = f"{path} is not a ttrace summary", (KeyError, TypeError, AttributeError)
    with reported(what, *kinds, advice=_DIRECTORY):
        _ = document["verdict"]
    if not is_sealed(data):
        raise _damaged(path)
    with reported(what, ValueError, *kinds, advice=_DIRECTORY):
        run = document["run"]
        identity, verdicts = run["id"], document["files"].get(VERDICTS, "")
        if set(run) == {"id"}:
            document["run"] = None
        summary = Summary.from_json(document)
    return _Sealed(summary, str(identity), str(verdicts))


def _run_of_candidate(directory: Path) -> str | None:
    """The run that saved the candidate beside a report, if there is one that can be read."""
    try:
        run = open_sealed(codec.read(directory / "candidate" / "meta.json")).get("run")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return run if isinstance(run, str) else None


def _read(path: Path) -> bytes:
    with reported(f"{path} cannot be read", OSError, codec.CodecError):
        if not path.exists():
            raise TTraceError(f"{path} does not exist: give the --ttrace-dir of a finished check")
        return codec.read(path, _MOST_BYTES)


def _damaged(path: Path) -> TTraceError:
    return TTraceError(
        f"{path} is damaged, or of a different run (its checksum does not match): {_AGAIN}"
    )
