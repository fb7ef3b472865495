# SPDX-License-Identifier: Apache-2.0
"""All nights in one file of JSON lines: a line for each night, followed by one for each case."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ttrace.errors import ExitCode, TTraceError
from megatron_ttrace.evaluation.nightly.records import Gap, Night, NightCase, NightPart, State
from megatron_ttrace.trace import owned

FILE = "nights.jsonl"


def prepare(path: Path) -> None:
    """Create the file before the long work.

    Raises:
        TTraceError: when that fails.
    """
    try:
        owned.make(path.parent, ignored=True)
        os.close(owned.append(path))
    except OSError as error:
        raise TTraceError(f"{path} is not writable ({error.strerror})") from error


def append(path: Path, night: Night) -> None:
    """Add a night. ``part`` is ``null`` in its own line, and set in those of its cases."""
    head = dataclasses.asdict(dataclasses.replace(night, cases=()))
    del head["cases"]
    lines = [{**head, "part": None, "exit_code": int(night.exit_code)}]
    lines += [{"began": night.began, **dataclasses.asdict(case)} for case in night.cases]
    with open(owned.append(path), "a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def last_good(path: Path) -> Night | None:
    """The last night with which later ones can be compared; ``None`` if there is none."""
    heads: dict[str, dict[str, Any]] = {}
    cases: dict[str, list[NightCase]] = {}
    for line in _lines(path):
        try:
            if line["part"] is None:
                heads[line["began"]] = line
            else:
                cases.setdefault(line["began"], []).append(_case(line))
        except (KeyError, TypeError, ValueError):
            continue  # cut off, or of another version
    for began, head in reversed(heads.items()):
        if head.get("exit_code") == ExitCode.EQUIVALENT:
            return Night(
                began=began,
                seconds=head["seconds"],
                versions=head["versions"],
                options=head["options"],
                cases=tuple(cases.get(began, ())),
                gaps=tuple(
                    Gap(NightPart(gap["part"]), gap["reason"], gap["by_choice"])
                    for gap in head["gaps"]
                ),
            )
    return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def _case(line: dict[str, Any]) -> NightCase:
    names = [field.name for field in dataclasses.fields(NightCase)]
    values = {name: line[name] for name in names}
    return NightCase(**{**values, "part": NightPart(line["part"]), "state": State(line["state"])})
