# SPDX-License-Identifier: Apache-2.0
"""Choose a part of the mutants: the same part every time, from every package and operator."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

from megatron_ttrace.evaluation.mutants.records import Mutant


def sample(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Deal ``count`` mutants from strata, one of each in turn, until enough or all are dealt.

    A stratum is a package and an operator. Order within it is by a hash of seed and id, so that a
    mutant that comes or goes with a release of Megatron leaves the others in their places.
    """
    strata: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        strata[mutant.operator, mutant.package].append(mutant)
    for stratum in strata.values():
        stratum.sort(key=lambda mutant: _place(mutant.id, seed))
    decks = [strata[key] for key in sorted(strata)]
    rounds = max(map(len, decks), default=0)
    dealt = [deck[turn] for turn in range(rounds) for deck in decks if turn < len(deck)]
    return dealt[:count]


def _place(name: str, seed: int) -> str:
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()
