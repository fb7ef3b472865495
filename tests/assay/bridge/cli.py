# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay bridge``: jobs of Megatron-Bridge, healthy and with faults."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.cli import command
from megatron_ttrace.trace.errors import ExitCode, TTraceError

if TYPE_CHECKING:
    from tests.assay.bridge.jobs import Answer

_EPILOG = """\
examples:
  python -m tests.assay bridge healthy --only 'sft*'
  python -m tests.assay bridge faults

healthy: all jobs of tests/assay/bridge/jobs.toml must be equivalent; where it says so they are
refused, or diverge because of a fault in Megatron-Bridge (docs/findings.md).
faults: known bugs of Megatron, and mistakes in Megatron-Bridge's own code
(tests/assay/planted/bridge.py), must be found in the right module.

exit code: 0 as promised; 1 a healthy job diverges; 2 else
"""


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``bridge`` command."""
    parser = command.add(
        subparsers,
        "bridge",
        _healthy,
        summary="check jobs of Megatron-Bridge, healthy and with faults",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(required=True, metavar="healthy|faults")
    for name, run in (("healthy", _healthy), ("faults", _faults)):
        action = command.add(
            actions,
            name,
            run,
            summary=f"{name} jobs",
            epilog=_EPILOG,
        )
        action.add_argument(
            "--only", action="append", default=[], metavar="PATTERN", help="of names; repeatable"
        )
        action.add_argument("--json", type=Path, metavar="FILE", help="write all rows to FILE")
        command.add_directory(action, "ttrace-out/bridge")
    return parser


def _chosen(table: Mapping[str, Any], patterns: Sequence[str]) -> list[str]:
    from megatron_ttrace.cpu import bridge

    if not bridge.installed():
        raise TTraceError("Megatron-Bridge is not installed: make bridge")
    names = [
        name
        for name in table
        if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]
    if not names:
        raise TTraceError(f"no job matches {' '.join(patterns)}")
    return names


def _line(name: str, answer: Answer) -> str:
    text = f"{name:<20} {answer.verdict:<11}"
    if answer.tensors:
        unchecked = f", {answer.unchecked} unchecked" if answer.unchecked else ""
        text += f" {answer.tensors} tensors{unchecked}, margin {answer.margin:.3g}"
    text += f"  {answer.seconds} s"
    for culprit, kind, cause in answer.culprits[:3]:
        text += f"\n    {culprit} {kind}: {cause or 'cause unknown'}"
    return text + (f"\n    {answer.line}" if answer.line else "")


def _healthy(args: argparse.Namespace) -> int:
    from tests.assay.bridge.jobs import check, jobs

    rows: dict[str, Answer] = {}
    promised = alarms = 0
    for name in _chosen(jobs(), args.only):
        job = jobs()[name]
        answer = rows[name] = check((args.directory / name).resolve(), job)
        promised += answer.verdict == job.promised
        alarms += answer.verdict == "diverged" and not job.finding
        print(_line(name, answer), flush=True)
        _write(args.json, rows)
    print(f"{promised} of {len(rows)} as promised")
    if alarms:
        return ExitCode.DIVERGED
    return ExitCode.EQUIVALENT if promised == len(rows) else ExitCode.COULD_NOT_CHECK


def _faults(args: argparse.Namespace) -> int:
    from tests.assay.bridge.faults import faults
    from tests.assay.bridge.jobs import check, jobs

    rows: dict[str, Answer] = {}
    right = 0
    for name in _chosen(faults(), args.only):
        fault = faults()[name]
        answer = rows[name] = check(
            (args.directory / name).resolve(),
            jobs()[fault.job],
            flags=fault.flags,
            planted=fault.planted,
        )
        right += (is_right := fault.is_found_by(answer))
        print(
            _line(name, answer),
            "" if is_right else f"    WRONG: expected {fault.module} {fault.kind}",
            flush=True,
        )
        _write(args.json, rows)
    print(f"{right} of {len(rows)} found in the right module")
    return ExitCode.EQUIVALENT if right == len(rows) else ExitCode.COULD_NOT_CHECK


def _write(file: Path | None, rows: Mapping[str, Answer]) -> None:
    if file is not None:
        content = {name: dataclasses.asdict(answer) for name, answer in rows.items()}
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")
