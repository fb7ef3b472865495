# SPDX-License-Identifier: Apache-2.0
"""Hold a finished report against what a known bug should have led to.

The checker never imports this: what is expected is looked at when the verdict is final.
"""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatchcase

from megatron_ttrace.evaluation.bugs.catalogue import Expected
from megatron_ttrace.trace.records import Culprit, Result, Summary

_LAYER = re.compile(r"decoder\.layers\.(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """How a report fares; ``explained`` is ``None`` where no explanation is asked for.

    ``margin`` is the smallest among the culprits with one.
    """

    detected: bool
    localised: bool
    explained: bool | None
    margin: float | None
    problem: str

    @property
    def met(self) -> bool:
        """Whether everything is as expected."""
        return self.detected and self.localised and self.explained is not False


def examine(summary: Summary, expected: Expected) -> Findings:
    """Compare a sick run's report with the expectation."""
    detected = summary.verdict is Result.DIVERGED
    culprits = summary.culprits
    right = [culprit for culprit in culprits if _matches(culprit, expected)]
    allowed = (expected.only or expected.module).replace("{last}", str(_last_layer(summary)))
    strays = [culprit for culprit in culprits if not fnmatchcase(culprit.name, allowed)]
    explained = (
        None if expected.cause is None else any(_explains(culprit, expected) for culprit in right)
    )
    margins = [culprit.margin for culprit in culprits if culprit.margin is not None]
    return Findings(
        detected=detected,
        localised=bool(right) and not strays,
        explained=explained,
        margin=min(margins) if margins else None,
        problem=_problem(detected, culprits, right, strays, explained),
    )


def _last_layer(summary: Summary) -> int:
    found = (_LAYER.match(name) for name in summary.execution_order)
    return max((int(match[1]) for match in found if match), default=0)


def _matches(culprit: Culprit, expected: Expected) -> bool:
    return (
        fnmatchcase(culprit.name, expected.module)
        and culprit.kind is expected.kind
        and culprit.direction is expected.direction
        and expected.index in (None, culprit.index)
        and culprit.verdict in expected.verdicts
    )


def _explains(culprit: Culprit, expected: Expected) -> bool:
    return culprit.cause is expected.cause and set(expected.axes) <= set(culprit.axes)


def _problem(
    detected: bool,
    culprits: tuple[Culprit, ...],
    right: list[Culprit],
    strays: list[Culprit],
    explained: bool | None,
) -> str:
    if not detected:
        return "found equivalent"
    if not right:
        named = ", ".join(_short(culprit) for culprit in culprits[:3])
        return f"names {named or 'no module'}"
    if strays:
        return f"also names {', '.join(_short(culprit) for culprit in strays[:3])}"
    if explained is False:
        return f"explains it as: {right[0].explanation}"
    return ""


def _short(culprit: Culprit) -> str:
    return f"{culprit.name} {culprit.kind} ({culprit.direction}, {culprit.verdict})"
