# SPDX-License-Identifier: Apache-2.0
"""The share of planted errors that each rule finds."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import torch

from tests.assay.baselines.rules import RULES, RunFacts
from tests.assay.baselines.statistics import merged, statistics
from tests.assay.baselines.tally import OURS
from tests.assay.planting import WHOLE_SIZE, Field

SIZES = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 4e-2, 0.5)
"""Relative errors of one rank's part, as noise in a random box; 0 shows false alarms."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlantedColumn:
    """One sort of error: ``found[rule]`` is the share that the rule flags."""

    sort: str
    trials: int
    found: dict[str, float]


def columns(field: Field, trials: int) -> list[PlantedColumn]:
    """Plant ``trials`` errors of each sort. All rules but ours judge the merged tensor."""
    generator = torch.Generator().manual_seed(1)
    facts = RunFacts(field.layers, field.epsilon)
    sorts = [(f"{size:g}", "noise", size) for size in SIZES]
    sorts += [(f"box: {shape}", shape, math.nan) for shape in WHOLE_SIZE]
    return [
        PlantedColumn(name, trials, _shares(field, shape, size, trials, generator, facts))
        for name, shape, size in sorts
    ]


def _shares(
    field: Field,
    shape: str,
    size: float,
    trials: int,
    generator: torch.Generator,
    facts: RunFacts,
) -> dict[str, float]:
    flagged: Counter[str] = Counter()
    for _ in range(trials):
        spoilt = field.spoil(shape, size, generator, relative=True)
        whole = field.whole(spoilt.key)
        stats = statistics(merged(field.shards(spoilt), whole), whole)
        flagged.update(rule.name for rule in RULES if rule.flags(spoilt.key, stats, facts))
        flagged[OURS] += field.verdict(spoilt.key, spoilt.rank, spoilt.local).verdict.is_failure
    return {rule: flagged[rule] / trials for rule in (*(r.name for r in RULES), OURS)}
