# SPDX-License-Identifier: Apache-2.0
"""Whether the places to look at are those that were changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_ttrace.trace.places import Place
from megatron_ttrace.trace.records import Culprit

SHARES = {
    "file_first": 0.7,
    "function_first": 0.5,
    "file_in_three": 0.85,
    "function_in_three": 0.65,
}
"""The least shares of a good checker, by the field of :class:`Looked`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """Whether the first place, or one of the first three, is in the right file and function."""

    file_first: bool
    function_first: bool
    file_in_three: bool
    function_in_three: bool


def looked(culprits: Sequence[Culprit], changed: Sequence[tuple[str, str]]) -> Looked:
    """The places of the first culprit against what was changed.

    Args:
        culprits: of a report.
        changed: modules and qualified names of functions; what is inside a function counts as it.
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
