# SPDX-License-Identifier: Apache-2.0
"""``hunt.html``: which pairs of values were in an equivalent job, and what diverges."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from markupsafe import Markup

from megatron_ttrace.evaluation.hunt.combinations import Space
from megatron_ttrace.evaluation.hunt.hunting import Tried
from megatron_ttrace.evaluation.hunt.reduction import Reduced
from megatron_ttrace.evaluation.recipes.collect import Answer
from megatron_ttrace.report import html


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """Two dimensions: how many pairs of their values were in an equivalent job, of how many."""

    good: int
    total: int

    @property
    def shade(self) -> int:
        """0 to 3, of the colours of heat maps."""
        return 3 * self.good // max(1, self.total)


def cells(space: Space, tried: Sequence[Tried]) -> dict[tuple[str, str], Cell]:
    """By the names of two dimensions."""
    good = {
        pair
        for each in tried
        if each.row.answer is Answer.EQUIVALENT
        for pair in itertools.permutations(each.combination.items(), 2)
    }
    count = Counter((first, second) for (first, _), (second, _) in good)
    size = {name: len(values) for name, values in space.values.items()}
    return {
        (first, second): Cell(count[first, second], size[first] * size[second])
        for first, second in itertools.permutations(space.values, 2)
    }


def render(space: Space, tried: Sequence[Tried], failures: Sequence[Reduced]) -> str:
    """The page."""
    values = [
        (name, value, Counter(t.row.answer for t in tried if t.combination.get(name) == value))
        for name, some in space.values.items()
        for value in some
    ]
    return (
        html.environment()
        .from_string(html.asset("hunt.html.j2"))
        .render(
            style=Markup(html.asset("report.css")),  # noqa: S704 - our own file
            answers=list(Answer),
            counts=Counter(each.row.answer for each in tried),
            failures=failures,
            names=list(space.values),
            cells=cells(space, tried),
            values=values,
            others=[t.row for t in tried if t.row.answer is Answer.COULD_NOT_CHECK],
        )
    )
