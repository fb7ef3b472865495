# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay same BEFORE AFTER``: do two versions of the checker answer alike?

Both directories hold reports of the same jobs, for instance of ``ttrace eval matrix --all`` with
each version. The verdict of each run, its culprits with their causes and the verdict of each tensor
are compared; texts and times are not.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ttrace.cli import command
from megatron_ttrace.trace.errors import ExitCode, TTraceError

_CULPRIT = ("name", "kind", "direction", "verdict", "cause", "axes")
_TENSOR = ("iteration", "microbatch", "kind", "name", "index")


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``same`` command."""
    parser = command.add(
        subparsers,
        "same",
        run,
        summary="compare the answers of two versions of the checker",
        epilog="example:\n  python -m tests.assay same before after",
    )
    for name in ("before", "after"):
        parser.add_argument(name, type=Path, metavar=name.upper())
    return parser


def run(args: argparse.Namespace) -> int:
    """Print every difference; 0 if there is none, else 2."""
    before, after = reports(args.before), reports(args.after)
    if not before or not after:
        raise TTraceError(f"{args.after if before else args.before}: there are no reports")
    lines = [*differences(before, after)]
    print("\n".join([*lines, f"{len(before.keys() & after.keys())} reports, {len(lines)} differ"]))
    return ExitCode.COULD_NOT_CHECK if lines else ExitCode.EQUIVALENT


def reports(directory: Path) -> dict[str, Path]:
    """The directories of reports, by their path below ``directory``."""
    files = sorted(directory.rglob("summary.json"))
    return {str(file.parent.relative_to(directory)): file.parent for file in files}


def differences(before: dict[str, Path], after: dict[str, Path]) -> Iterator[str]:
    """One line for each report that differs, or that only one side has."""
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            yield f"{name}: only {'before' if name in before else 'after'}"
            continue
        old, new = answer(before[name]), answer(after[name])
        changed = [f"{part}: {old[part]} -> {new[part]}" for part in old if old[part] != new[part]]
        if changed:
            yield f"{name}: {'; '.join(changed)}"[:1000]


def answer(report: Path) -> dict[str, Any]:
    """What two versions must agree on."""
    summary = json.loads((report / "summary.json").read_text(encoding="utf-8"))
    tensors = {}
    with (report / "verdicts.jsonl").open(encoding="utf-8") as file:
        for line in file:
            verdict = json.loads(line)
            if "verdict" in verdict and "name" in verdict:
                tensors[tuple(verdict[field] for field in _TENSOR)] = verdict["verdict"]
    return {
        "verdict": summary["verdict"],
        "culprits": [[culprit.get(field) for field in _CULPRIT] for culprit in summary["culprits"]],
        "not passed": sorted(f"{key} {value}" for key, value in tensors.items() if value != "pass"),
        "tensors": len(tensors),
    }
