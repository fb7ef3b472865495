# SPDX-License-Identifier: Apache-2.0
"""The functions that ran in the traced steps by where they ran, and what of it is right."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from megatron_ttrace.trace.collectives import Ledger, Phase, pattern
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import Kind, Outcome

type Context = tuple[str, Phase]
"""A module without the numbers of layers, and a part of the step."""

BUILDING: Context = ("", Phase.CONSTRUCTION)
_DEPTH = 6
"""Calls that are followed downwards."""
_SHOWN_BY = {Phase.FORWARD: (Kind.OUTPUT, Kind.ROUTING), Phase.BACKWARD: (Kind.GRAD_INPUT,)}


class Code:
    """The functions that ran; each is known by its number.

    Attributes:
        functions: by number.
        at: those of each context, in the order of their first calls.
        contexts: of each function, within the traced steps.
    """

    def __init__(self, ledger: Ledger) -> None:
        calls = ledger.sources.calls
        self.functions = calls.functions
        self.at: dict[Context, dict[int, None]] = defaultdict(dict)
        self.contexts: dict[int, set[Context]] = defaultdict(set)
        self._callers: dict[tuple[int, Context], list[int]] = defaultdict(list)
        self._callees: dict[tuple[int, Context], list[int]] = defaultdict(list)
        for function, caller, module, phase, _ in calls.calls:
            context = module, phase
            self.at[context][function] = None
            if context != BUILDING:
                self.contexts[function].add(context)
            self._callers[function, context].append(caller)
            self._callees[caller, context].append(function)
        self._numbers = {(one.file, one.name): n for n, one in enumerate(self.functions)}

    def number(self, where: str) -> int | None:
        """The function that ``file:line (function)`` names."""
        place = Place.of(where, Clue.RAN)
        return None if place is None else self.named(place.file, place.function)

    def named(self, file: str, name: str) -> int | None:
        """A function by its file and its qualified name."""
        return self._numbers.get((file, name))

    def callers(self, function: int, context: Context) -> list[int]:
        """Functions that call a function in the same context."""
        known = self._callers.get((function, context), ())
        return [caller for caller in known if caller in self.at[context]]

    def entered_by(self, function: int, inside: Context, outside: Context) -> list[int]:
        """What calls a module's function from the context around it, past any ``__call__``."""
        found: dict[int, None] = {}
        for known in (waiting := [(function, inside)]):
            for caller in self._callers.get(known, ()):
                if caller >= 0 and self.functions[caller].name.endswith(".__call__"):
                    waiting += [(caller, outside)] * ((caller, outside) not in waiting)
                elif caller >= 0:
                    found[caller] = None
        return list(found)

    def helpers(self, function: int) -> list[int]:
        """What a schedule's function calls for the loss, outside of modules."""
        parts = Phase.OPTIMIZER, Phase.OTHER
        return [
            called for part in parts for called in self._callees.get((function, ("", part)), ())
        ]

    def chain(self, function: int, context: Context) -> list[int]:
        """A function and all that leads to it in the same context, the nearest first."""
        found = dict.fromkeys([function])
        for known in (waiting := [function]):
            fresh = [caller for caller in self.callers(known, context) if caller not in found]
            found |= dict.fromkeys(fresh)
            waiting += fresh
        return list(found)

    def below(self, function: int, context: Context, but: Collection[int] = ()) -> dict[int, int]:
        """A function and what it called, ``but`` some, and these in turn; each with its depth."""
        found = {function: 0}
        for known in (waiting := [function]):
            for called in self._callees.get((known, context), ()):
                if called not in found and called not in but and found[known] < _DEPTH:
                    found[called] = found[known] + 1
                    waiting.append(called)
        return found


class Outcomes:
    """What passed and what failed, by name (without numbers) and kind."""

    def __init__(self, verdicts: Iterable[Judged]) -> None:
        self._failed: set[tuple[str, Kind]] = set()
        self._passed: set[tuple[str, Kind]] = set()
        for verdict in (known := list(verdicts)):
            key = pattern(verdict.name.partition("#")[0]), verdict.kind
            if verdict.verdict.is_failure:
                self._failed.add(key)
            elif verdict.verdict is Outcome.PASS:
                self._passed.add(key)
        self._passed -= self._failed
        self._counted: Counter[str] = Counter(
            v.name for v in known if v.kind is Kind.COUNTED and v.verdict.is_failure
        )

    def names(self, kind: Kind) -> set[str]:
        """Tensors of a kind that fail."""
        return {name for name, each in self._failed if each is kind}

    def separating(self, kind: Kind, marked: Mapping[str, Collection[str]]) -> set[str]:
        """Marks of the failing parameters, by a kind of tensor, that no other parameter has.

        Args:
            kind: of the tensors.
            marked: marks by the parameter's name, without numbers.
        """
        failed = [{*marked[name]} for name in self.names(kind) if name in marked]
        others = (marks for name, marks in marked.items() if (name, kind) not in self._failed)
        return set.intersection(*failed).difference(*others) if failed else set()

    def counts(self, parameter: str) -> int:
        """How many statistics, as the norm and the step, a parameter is wrong in."""
        return self._counted[parameter]

    def losses(self) -> dict[str, bool]:
        """By name, whether all numbers that are logged of a loss are right."""
        known = dict.fromkeys(self.names(Kind.METRIC), False)
        known |= {name: True for name, kind in self._passed if kind is Kind.METRIC}
        return {name: right for name, right in known.items() if "loss" in name.split("_")}

    def is_right(self, context: Context) -> bool:
        """Whether all that a module made in a pass of the step is right."""
        module, phase = context
        return any((module, kind) in self._passed for kind in _SHOWN_BY.get(phase, ()))

    def failed(self, kind: Kind, module: str) -> bool:
        """Whether a tensor of a kind of a module's own parameters fails."""
        name = pattern(module.partition("#")[0])
        return any(one.rpartition(".")[0] == name for one in self.names(kind))

    def share(self, kind: Kind) -> float:
        """How many of the tensors of a kind fail, of those that were judged."""
        failed, passed = (
            sum(each is kind for _, each in names) for names in (self._failed, self._passed)
        )
        return failed / max(1, failed + passed)
