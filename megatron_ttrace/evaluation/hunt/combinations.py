# SPDX-License-Identifier: Apache-2.0
"""Combinations of options that have all pairs of values (a covering array of strength 2).

Most faults need no more than two options together (Kuhn, Wallace, Gallo: "Software fault
interactions", IEEE Transactions on Software Engineering 30, 2004). Whether values go together is
known to Megatron alone, so arrays are built by trial, from each pair that is not covered yet
outwards.
"""

import dataclasses
import itertools
import random
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.known_faults import Finding
from megatron_ttrace.jobs.shrink import axes
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags, Flag
from megatron_ttrace.trace import codec

type Combination = Mapping[str, str]
"""The values that differ from the base, by dimension."""
type Pair = frozenset[tuple[str, str]]

_NONE = " "
"""The value of a dimension without the options that the base has."""
_DOUBTFUL = 2
"""Failed jobs of a pair of values that was in no other."""
_MOST = 12
"""Values that differ from the base: with more, a fault hides others more often than it is found."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dimension:
    """Options of which a job has one value.

    Attributes:
        name: in words.
        values: flags of Megatron-LM that belong together; after a bar between spaces those that
            they need, which are added where nothing else sets their options.
        within: the dimension without which this has no effect.
        copies: whether the values are sizes of data parallelism, which has no flag.
    """

    name: str
    values: tuple[str, ...]
    within: str = ""
    copies: bool = False

    def options(self) -> set[str]:
        """All that a value can set."""
        flags = () if self.copies else (f for value in self.values for f in _flags(value)[0])
        return {flag.option or flag.name for flag in flags}


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """``options.toml``: a small job, what is combined around it, and what is known to fail.

    ``fails``: what Megatron does not refuse before a job ends with an error.
    """

    base: str
    dimension: tuple[Dimension, ...]
    fails: tuple[Finding, ...]


def table() -> Table:
    """The content of ``options.toml``."""
    text = Path(__file__).with_name("options.toml").read_text(encoding="utf-8")
    return codec.decode(Table, tomllib.loads(text))


def _flags(value: str) -> tuple[Sequence[Flag], Sequence[Flag]]:
    """Those of a value, and those that it needs."""
    parts = (CommandFlags.parse(words.split()).flags for words in value.partition(" | ")[::2])
    return next(parts), next(parts)


class Space:
    """The commands around a base."""

    def __init__(self, base: Command, dimensions: Sequence[Dimension]) -> None:
        """What the base has can be left out as well, so that is one more value."""
        self._base = base
        self.dimensions = {each.name: each for each in dimensions}
        given = {flag.option for flag in CommandFlags.parse(base.arguments).flags}
        self.values = {
            each.name: (*each.values, *([_NONE] if given & each.options() else []))
            for each in dimensions
        }

    def command(self, combination: Combination) -> Command:
        """The base with other values."""
        flags = list(CommandFlags.parse(self._base.arguments).flags)
        needed: list[Flag] = []
        copies = 1
        for name, value in combination.items():
            dimension = self.dimensions[name]
            if dimension.copies:
                copies = int(value)
                continue
            replaced = dimension.options()
            flags = [flag for flag in flags if (flag.option or flag.name) not in replaced]
            values, needs = _flags(value)
            flags += values
            needed += needs
        # Of what is set more than once the last counts.
        given, own = CommandFlags([*needed, *flags]), CommandFlags.parse(self._base.arguments)
        ranks = (self._base.ranks or 1) * copies
        ranks = ranks * axes.weight_shards(given) // axes.weight_shards(own)
        for axis in ("tp", "pp", "cp"):
            option = axes.OPTIONS[axis]
            ranks = ranks * max(1, given.integer(option, 1)) // max(1, own.integer(option, 1))
        words = tuple(word for flag in given.flags for word in flag.words())
        return dataclasses.replace(self._base, arguments=words, ranks=ranks)

    def pairs(self) -> list[Pair]:
        """All pairs of values of two dimensions; those of the base's own are in every job."""
        return [
            frozenset(((first, value), (second, other)))
            for first, second in itertools.combinations(self.values, 2)
            for value in self.values[first]
            for other in self.values[second]
        ]

    def starts(self, pair: Pair, chance: random.Random) -> Combination:
        """A pair, with what gives its values an effect."""
        # Sorted: the order of a set is another one in each process, and words decide a job's key.
        combination = dict(sorted(pair))
        for name in [*combination]:
            within = self.dimensions[name].within
            if within and within not in combination:
                combination[within] = chance.choice(self.dimensions[within].values)
        return combination

    def has_effect(self, combination: Combination) -> bool:
        """Whether no value of it is without effect."""
        wholes = (self.dimensions[name].within for name in combination)
        return all(not whole or combination.get(whole, _NONE) != _NONE for whole in wholes)


@dataclasses.dataclass
class Covering:
    """Combinations, until each pair is in one of them or cannot be.

    ``valid``: whether a combination is worth a check. ``excluded`` are pairs that are not, with
    otherwise unchanged options.
    """

    space: Space
    valid: Callable[[Combination], bool]
    seed: int
    covered: set[Pair] = dataclasses.field(default_factory=set)
    excluded: set[Pair] = dataclasses.field(default_factory=set)
    _failed: Counter[Pair] = dataclasses.field(default_factory=Counter)

    def __iter__(self) -> Iterator[Combination]:
        """The base itself first; the same ones in the same order for the same seed."""
        chance = random.Random(self.seed)  # noqa: S311 - no secret
        yield {}
        waiting = self.space.pairs()
        chance.shuffle(waiting)
        left = set(waiting)
        for pair in waiting:
            if pair not in left:
                continue
            combination = self.space.starts(pair, chance)
            if not self.valid(combination):
                self.excluded.add(pair)
                continue
            combination = self._grown(combination, left, chance)
            yield combination
            # What did not run covers nothing; with other options its pairs may.
            pairs = _pairs_of(combination)
            self._failed.update(pairs - self.covered)
            left -= self.covered

    def ran(self, combination: Combination) -> None:
        """Count the pairs of a combination that was compared."""
        self.covered |= _pairs_of(combination)

    def _grown(
        self, combination: Combination, left: set[Pair], chance: random.Random
    ) -> Combination:
        """With as many further pairs as can be added dimension by dimension."""
        others = [name for name in self.space.values if name not in combination]
        chance.shuffle(others)
        for name in others[: _MOST - len(combination)]:
            gains: dict[str, int] = {}
            for value in self.space.values[name]:
                added = {frozenset(((name, value), item)) for item in combination.items()}
                # A pair that never ran does not spoil another combination: it begins its own.
                is_doubtful = any(self._failed[pair] >= _DOUBTFUL for pair in added - self.covered)
                gains[value] = 0 if is_doubtful else len(added & left)
            order = sorted(gains, key=lambda value: (-gains[value], chance.random()))
            for value in order:
                if not gains[value]:
                    break
                larger = {**combination, name: value}
                if self.space.has_effect(larger) and self.valid(larger):
                    combination = larger
                    break
        return combination


def _pairs_of(combination: Combination) -> set[Pair]:
    return {frozenset(two) for two in itertools.combinations(combination.items(), 2)}
