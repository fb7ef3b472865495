# SPDX-License-Identifier: Apache-2.0
"""Which functions near a failure returned something else, though they were given the same.

A module is found by its inputs, which pass, and its output, which fails. Its functions are judged
in the same way, by norms of what they were given and returned (compare/norms.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from megatron_ttrace.diagnose.code import Code, Context, Outcomes
from megatron_ttrace.trace.collectives import Agreement, Ledger, Phase, pattern
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import is_within, module_of
from megatron_ttrace.trace.records import Direction

type _Stray = tuple[int, Context]

_PHASES = {
    Direction.FORWARD: Phase.FORWARD,
    Direction.BACKWARD: Phase.BACKWARD,
    Direction.GRADIENT: Phase.BACKWARD,
}
_LATER = 0.5
"""Weight of one that strays, by the number of those before it: it may have been given what these
returned in another way, for instance in what was saved for the backward pass."""
_SPEAK_AGAINST = {Agreement.ALIKE, Agreement.GIVEN_OTHER}
_LESS = 0.5
"""Weight of what returned the same, or was given something else already."""


class ByNorms:
    """Agreements of functions in the modules in, or around, the one that failed.

    Attributes:
        straying: functions that returned something else, though none that they called did, with
            weights.
        called: what these called that the reference's did not.
        alike: by function, the modules in which it returned the same.
    """

    def __init__(self, code: Code, ledger: Ledger, outcomes: Outcomes, verdict: Judged) -> None:
        self._near: defaultdict[int, dict[Context, Agreement]] = defaultdict(dict)
        self.straying, self.called = dict[int, float](), set[int]()
        self.alike: defaultdict[int, set[str]] = defaultdict(set)
        self._phase: Phase | None = _PHASES.get(verdict.direction)
        if self._phase is not None:
            self._find(code, ledger, outcomes, pattern(module_of(verdict.name)))

    def weight(self, number: int) -> float:
        """Of a function: less if all it did in this direction is right, or was wrong before.

        Norms that show no function that strays do not show what is wrong.
        """
        near = self._near.get(number, {}) if self.straying else {}
        agreements = {agreed for (_, phase), agreed in near.items() if phase is self._phase}
        return _LESS if agreements and agreements <= _SPEAK_AGAINST else 1.0

    def _find(self, code: Code, ledger: Ledger, outcomes: Outcomes, module: str) -> None:
        elsewhere = set[int]()
        for where, name, phase, agreement in ledger.compared:
            number = code.number(where)
            if number is None:
                continue
            if agreement is Agreement.ALIKE:
                self.alike[number].add(name)
            if is_within(name, module) or is_within(module, name):
                self._near[number][name, phase] = agreement
            elif agreement is Agreement.STRAYS and outcomes.is_right((name, phase)):
                elsewhere.add(number)  # so it does by design
        inside, strays, unknown = list[_Stray](), list[_Stray](), set[_Stray]()
        for number, near in self._near.items():
            for (name, phase), agreement in near.items() if number not in elsewhere else ():
                stray = number, (name, phase)
                if agreement is Agreement.RETURNED_OTHER:
                    unknown.add(stray)
                elif agreement is Agreement.STRAYS and phase in (Phase.FORWARD, self._phase):
                    (inside if is_within(name, module) else strays).append(stray)
        innermost = [*_innermost(code, inside or strays, unknown)]
        order = sorted({number for number, _ in innermost}, key=code.first.__getitem__)
        self.straying = {number: _LATER**position for position, number in enumerate(order)}
        below = {n for stray in innermost for n in code.below(*stray)} - self._near.keys()
        self.called = {n for n in below if code.functions[n].where in {*ledger.apart}}


def _innermost(
    code: Code, strays: Collection[_Stray], unknown: Collection[_Stray]
) -> Iterable[_Stray]:
    """Those that called no other; if one that strays called it, what was given is not wrong."""
    wrong = {*strays, *unknown}
    below = {
        stray: {(other, stray[1]) for other in code.below(*stray)} & wrong - {stray}
        for stray in wrong
    }
    for stray in {*strays}.union(*(below[stray] for stray in strays)):
        if not below[stray]:
            yield stray
