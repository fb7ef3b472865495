# SPDX-License-Identifier: Apache-2.0
"""All nights in one file of JSON lines, and what changed since the last good one."""

import contextlib
import dataclasses
import json
import os
from collections import Counter
from pathlib import Path

from megatron_ttrace.evaluation.nightly.records import Night, NightCase, State
from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.errors import ExitCode, reported

FILE = "nights.jsonl"
"""A line for each night, followed by one for each case."""


def prepare(path: Path) -> None:
    """Create the file before the long work.

    Raises ``TTraceError`` when that fails.
    """
    with reported(f"{path} is not writable", OSError):
        owned.make(path.parent, ignored=True)
        os.close(owned.append(path))


def append(path: Path, night: Night) -> None:
    """Add a night. ``part`` is ``null`` in its own line, and set in those of its cases."""
    head = dataclasses.asdict(dataclasses.replace(night, cases=()))
    del head["cases"]
    lines = [{**head, "part": None, "exit_code": int(night.exit_code)}]
    lines += [{"began": night.began, **codec.encode(case)} for case in night.cases]
    with open(owned.append(path), "a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def last_good(path: Path) -> Night | None:
    """The last night with which later ones can be compared; ``None`` if there is none.

    Lines that were cut off, or are of another version, are skipped.
    """
    nights: dict[str, Night] = {}
    cases: dict[str, list[NightCase]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(codec.CodecError):
            line = codec.parse(text)
            if not isinstance(line, dict):
                continue
            began = str(line.get("began"))
            if line.get("part") is not None:
                cases.setdefault(began, []).append(codec.decode(NightCase, line))
            elif line.get("exit_code") == ExitCode.EQUIVALENT:
                nights[began] = codec.decode(Night, line)
    if not nights:
        return None
    began, night = nights.popitem()
    return dataclasses.replace(night, cases=tuple(cases.get(began, ())))


def headline(night: Night) -> str:
    """E.g. ``all good: 134 cases`` or ``1 missed, 2 false alarms``."""
    counts = Counter(case.state for case in night.cases)
    alarms = counts[State.ALARM]
    texts = [f"{counts[State.MISSED]} missed"] * bool(counts[State.MISSED])
    texts += [f"{alarms} false alarm{'s' * (alarms > 1)}"] * bool(alarms)
    texts += [f"{counts[State.BROKEN]} could not run"] * bool(counts[State.BROKEN])
    lost = [gap.part.value for gap in night.gaps]
    texts += [f"{' and '.join(lost)} incomplete"] * bool(lost)
    return ", ".join(texts) or f"all good: {len(night.cases)} cases"


def changes(night: Night, good: Night | None) -> list[str]:
    """What is wrong, then what changed since the last good night."""
    broken = [case for case in night.cases if case.state is State.BROKEN]
    lines = [f"{c.state}: {c.part} {c.name}: {c.note}" for c in (*night.bad, *broken)]
    lines += [f"{gap.part} is incomplete: {gap.reason}" for gap in night.gaps]
    if night.exit_code is ExitCode.EQUIVALENT:
        return lines
    if good is None:
        return [*lines, "there is no good night yet to compare with"]
    moved = _moved(good.versions, night.versions, "not installed")
    moved += _moved(good.options, night.options, "")
    lines.append(f"since the last good night, {good.began}:")
    lines += moved or ["  no version and no option changed"]
    ran = {(case.part, case.name) for case in good.cases}
    if new := sum((case.part, case.name) not in ran for case in (*night.bad, *broken)):
        lines.append(f"  {new} of the cases above did not run then")
    return lines


def _moved(then: dict[str, str], now: dict[str, str], absent: str) -> list[str]:
    """A line for each value that changed, appeared or went."""
    return [
        f"  {name}: {then.get(name, absent) or 'none'} -> {now.get(name, absent) or 'none'}"
        for name in sorted({*then, *now})
        if then.get(name, absent) != now.get(name, absent)
    ]
