# SPDX-License-Identifier: Apache-2.0
"""What changed since an earlier night: results of cases, versions, options."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from megatron_ttrace.evaluation.nightly.records import Night, NightCase, State

ABSENT = "not installed"


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """The differences between two nights.

    Attributes:
        worse: cases that are not good now, and had another result then (or ``None``).
        versions, options: ``name: (then, now)`` of those that changed.
    """

    worse: tuple[tuple[NightCase, State | None], ...]
    versions: Mapping[str, tuple[str, str]]
    options: Mapping[str, tuple[str, str]]

    @property
    def moved(self) -> Mapping[str, tuple[str, str]]:
        """Versions and options that changed."""
        return {**self.versions, **self.options}


def compare(then: Night, now: Night) -> Changes:
    """Compare a night with an earlier one."""
    before = {(case.part, case.name): case.state for case in then.cases}
    return Changes(
        worse=tuple(
            (case, was)
            for case in now.cases
            if case.state not in (State.GOOD, was := before.get((case.part, case.name)))
        ),
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
    counts = Counter(case.state for case in night.cases)
    alarms = counts[State.ALARM]
    said = [f"{counts[State.MISSED]} missed"] * bool(counts[State.MISSED])
    said += [f"{alarms} false alarm{'s' * (alarms > 1)}"] * bool(alarms)
    said += [f"{counts[State.BROKEN]} could not run"] * bool(counts[State.BROKEN])
    lost = [gap.part.value for gap in night.gaps if not gap.by_choice]
    said += [f"{' and '.join(lost)} incomplete"] * bool(lost)
    return ", ".join(said) or f"all good: {len(night.cases)} cases"


def lines(night: Night, good: Night | None) -> list[str]:
    """What is wrong, then what changed since the last good night."""
    broken = [case for case in night.cases if case.state is State.BROKEN]
    said = [f"{c.state}: {c.part} {c.name}: {c.note}" for c in (*night.bad, *broken)]
    said += [f"{gap.part} is incomplete: {gap.reason}" for gap in night.gaps if not gap.by_choice]
    if night.is_good:
        return said
    if good is None:
        return [*said, "there is no good night yet to compare with"]
    changes = compare(good, night)
    said.append(f"since the last good night, {good.began}:")
    said += [
        f"  {name}: {then or 'none'} -> {now or 'none'}"
        for name, (then, now) in changes.moved.items()
    ]
    if not changes.moved:
        said.append("  no version and no option changed")
    if new := sum(was is None for _, was in changes.worse):
        said.append(f"  {new} of the cases above did not run then")
    return said
