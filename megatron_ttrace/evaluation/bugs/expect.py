# SPDX-License-Identifier: Apache-2.0
"""Compare a finished report with what a known bug should lead to.

The checker never imports this: expectations are read when the verdict is final.
"""

import dataclasses
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from megatron_ttrace.evaluation.bugs.catalogue import Expected
from megatron_ttrace.trace.places import Place
from megatron_ttrace.trace.records import Culprit, Result, Summary

_LAYER = re.compile(r"decoder\.layers\.(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Assessment:
    """How a report compares with the expectation.

    Attributes:
        localised: whether the expected culprit is named, and no other.
        explained: whether its cause is the expected one; ``None`` if none is expected.
        margin: the smallest of the culprits' margins.
        problem: what is not as expected, in words.
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


def assess(summary: Summary, expected: Expected) -> Assessment:
    """Compare the report of a run with the bug with the expectation."""
    detected = summary.verdict is Result.DIVERGED
    culprits = summary.culprits
    right = [culprit for culprit in culprits if _matches(culprit, expected)]
    allowed = (expected.only or expected.module).replace("{last}", str(_last_layer(summary)))
    strays = [culprit for culprit in culprits if not fnmatchcase(culprit.name, allowed)]
    explained = None
    if expected.cause is not None:
        explained = any(
            culprit.cause is expected.cause and set(expected.axes) <= set(culprit.axes)
            for culprit in right
        )
    problem = ""
    if not detected:
        problem = "found equivalent"
    elif not right:
        problem = f"names {_named(culprits) or 'no module'}"
    elif strays:
        problem = f"also names {_named(strays)}"
    elif explained is False:
        problem = f"explains it as: {right[0].explanation}"
    return Assessment(
        detected=detected,
        localised=bool(right) and not strays,
        explained=explained,
        margin=min((c.margin for c in culprits if c.margin is not None), default=None),
        problem=problem,
    )


def _last_layer(summary: Summary) -> int:
    matches = (_LAYER.match(name) for name in summary.execution_order)
    return max((int(match[1]) for match in matches if match), default=0)


def _matches(culprit: Culprit, expected: Expected) -> bool:
    return (
        fnmatchcase(culprit.name, expected.module)
        and culprit.kind is expected.kind
        and culprit.direction is expected.direction
        and expected.index in (None, culprit.index)
        and culprit.verdict in expected.verdicts
    )


def _named(culprits: list[Culprit] | tuple[Culprit, ...]) -> str:
    return ", ".join(f"{c.name} {c.kind} ({c.direction}, {c.verdict})" for c in culprits[:3])


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """Whether the first place, or one of the first three, is in the right file and function."""

    file_first: bool
    function_first: bool
    file_in_three: bool
    function_in_three: bool


def looked(culprits: Sequence[Culprit], changed: Sequence[tuple[str, str]]) -> Looked:
    """The places of the first culprit against what was changed.

    ``changed``: modules and qualified names of functions; what is inside a function counts as it.
    """
    places = culprits[0].places if culprits else ()

    def is_file(place: Place, module: str) -> bool:
        path = module.replace(".", "/")
        return place.file in (f"{path}.py", f"{path}/__init__.py")

    files = [any(is_file(place, module) for module, _ in changed) for place in places]
    functions = [
        any(
            is_file(place, m) and f"{place.function}.".startswith(f"{name}.") for m, name in changed
        )
        for place in places
    ]
    return Looked(any(files[:1]), any(functions[:1]), any(files[:3]), any(functions[:3]))
