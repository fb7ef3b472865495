# SPDX-License-Identifier: Apache-2.0
"""What is different tonight: cases that came out otherwise, margins that shrank, versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron_ttrace.evaluation.nightly.records import Case, Night, State

ABSENT = "not installed"


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """Two nights side by side.

    Attributes:
        worse: cases that were good, or not there, and are not good now; with what they were.
        better: cases that are good now and were not.
        gone: cases that were run then and not now.
        versions: ``name: (then, now)`` of what changed.
        options: likewise; with other options other cases are run.
    """

    worse: tuple[tuple[Case, State | None], ...]
    better: tuple[Case, ...]
    gone: tuple[Case, ...]
    versions: Mapping[str, tuple[str, str]]
    options: Mapping[str, tuple[str, str]]


def compare(then: Night, now: Night) -> Changes:
    """Hold a night against an earlier one."""
    before = {(case.part, case.name): case for case in then.cases}
    after = {(case.part, case.name) for case in now.cases}
    worse, better = [], []
    for case in now.cases:
        known = before.get((case.part, case.name))
        was = known.state if known else None
        if case.state is not State.GOOD and was is not case.state:
            worse.append((case, was))
        elif case.state is State.GOOD and known and was is not State.GOOD:
            better.append(case)
    return Changes(
        worse=tuple(worse),
        better=tuple(better),
        gone=tuple(case for key, case in before.items() if key not in after),
        versions=_differences(then.versions, now.versions, ABSENT),
        options=_differences(then.options, now.options, ""),
    )


def _differences(
    then: Mapping[str, str], now: Mapping[str, str], absent: str
) -> dict[str, tuple[str, str]]:
    return {
        name: (then.get(name, absent), now.get(name, absent))
        for name in sorted({*then, *now})
        if then.get(name, absent) != now.get(name, absent)
    }


def headline(night: Night) -> str:
    """E.g. ``all good: 134 cases`` or ``1 missed, 2 false alarms``."""
    counts = {state: sum(case.state is state for case in night.cases) for state in State}
    alarms = counts[State.ALARM]
    said = [f"{counts[State.MISSED]} missed"] * bool(counts[State.MISSED])
    said += [f"{alarms} false alarm{'s' * (alarms > 1)}"] * bool(alarms)
    said += [f"{counts[State.BROKEN]} could not run"] * bool(counts[State.BROKEN])
    lost = [gap.part.value for gap in night.gaps if not gap.by_choice]
    said += [f"{' and '.join(lost)} incomplete"] * bool(lost)
    return ", ".join(said) or f"all good: {len(night.cases)} cases"


def lines(night: Night, good: Night | None) -> list[str]:
    """What a person reads first: what is wrong, then what changed since the last good night."""
    said = [f"{case.state}: {case.part} {case.name}: {case.note}" for case in night.bad]
    said += [
        f"{case.state}: {case.part} {case.name}: {case.note}"
        for case in night.cases
        if case.state is State.BROKEN
    ]
    said += [f"{gap.part} is incomplete: {gap.reason}" for gap in night.gaps if not gap.by_choice]
    if night.is_good:
        return said
    if good is None:
        return [*said, "there is no good night yet to compare with"]
    changes = compare(good, night)
    said.append(f"since the last good night, {good.began}:")
    moved = {**changes.versions, **changes.options}
    said += [
        f"  {name}: {then or 'none'} -> {now or 'none'}" for name, (then, now) in moved.items()
    ]
    if not moved:
        said.append("  no version and no option changed")
    old = len([1 for case, was in changes.worse if was is not None])
    if new := len(changes.worse) - old:
        said.append(f"  {new} of the cases above did not run then")
    return said
