# SPDX-License-Identifier: Apache-2.0
"""Numbers that a module was built with and that differ from the reference's, as seen by its name.

A layout may build modules differently. Then it does so in every layer: a number that is the
reference's in other layers ought to be so in all.
"""

from collections.abc import Callable, Iterator

from megatron_ttrace.trace.collectives import Numbers, pattern
from megatron_ttrace.trace.findings import Cause, OtherSetting
from megatron_ttrace.trace.modules import around

_POINTS = (2.5, 3.0)
"""For what a module computes itself; for what it is given by the module around it."""


def differing(module: str, ours: Numbers, expected: Numbers) -> OtherSetting | None:
    """A number of a module, or of one in it, that only some layers have as the reference does."""
    for name in (name for name in expected if f"{name}.".startswith(f"{module}.")):
        others = [other for other in expected if other != name and pattern(other) == pattern(name)]
        for attribute, right in expected[name].items():
            values = _of(name, attribute, ours)
            if values and values.isdisjoint(right):
                alike = (_of(other, attribute, ours) for other in others)
                equal = (expected[other].get(attribute, ()) for other in others)
                if any(not a.isdisjoint(b) for a, b in zip(alike, equal, strict=True)):
                    return OtherSetting(
                        cause=Cause.SETTING,
                        module=name,
                        attribute=attribute,
                        value=min(values),
                        expected=min(right),
                    )
    return None


def configuring(
    module: str, constructor: Callable[[str], int | None]
) -> Iterator[tuple[int, float]]:
    """Constructors that may have given a module its numbers, with points: its own, and the next."""
    known = (constructor(name) for name in (module, *around(module)))
    yield from zip((number for number in known if number is not None), _POINTS, strict=False)


def _of(name: str, attribute: str, numbers: Numbers) -> set[float]:
    """What ranks have; a number that all layers of a rank have is noted once."""
    places = (numbers.get(at, {}) for at in (name, pattern(name)))
    return {value for named in places for value in named.get(attribute, ())}
