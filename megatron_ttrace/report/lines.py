# SPDX-License-Identifier: Apache-2.0
"""How the panels of the heat map share the width of a page, on one line or on several.

The width is not known when the page is written, and the map needs no script: the style sheet
chooses between arrangements by the actual width (container queries).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import combinations, pairwise


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """Panels on lines: fits from ``width`` pixels on; ``starts`` marks the first of each line."""

    width: int
    starts: tuple[bool, ...]


def arrangements(widths: Sequence[int], label: int, gap: int) -> list[Arrangement]:
    """The best arrangement on every number of lines, the narrowest first, panels in their order.

    Each line begins with row labels of ``label`` pixels; ``gap`` follows each panel and label.
    """
    found: list[Arrangement] = []
    count = len(widths)
    for lines in range(1, count + 1):
        best = min(
            (_width([0, *cuts, count], widths, label, gap), cuts)
            for cuts in combinations(range(1, count), lines - 1)
        )
        if not found or best[0] < found[-1].width:
            starts = tuple(panel in (0, *best[1]) for panel in range(count))
            found.append(Arrangement(best[0], starts))
    return found[::-1]


def _width(ends: Sequence[int], widths: Sequence[int], label: int, gap: int) -> int:
    return label + gap + max(sum(widths[a:b]) + gap * (b - a) for a, b in pairwise(ends))
