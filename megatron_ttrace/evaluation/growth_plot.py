# SPDX-License-Identifier: Apache-2.0
"""A plot of tolerances over depth, as SVG: one panel per model, logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources

import jinja2

from megatron_ttrace.evaluation.growth import SERIES, Growth

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 260, 220, 44, 26, 14
_COLOURS = ("#1b6ca8", "#c2571a", "#3a7d44")


def svg(panels: Sequence[Growth], title: str, bound: tuple[float, float]) -> str:
    """Draw one panel per model; ``bound`` are k and C of the dashed line."""
    values = [v for g in panels for series in g.by_layer.values() for v in series]
    values += [v for g in panels for v in g.bound(*bound)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def y(value: float) -> float:
        return round(_TOP + _HEIGHT * (high - math.log10(value)) / (high - low), 1)

    source = resources.files(__package__) / "templates" / "growth.svg.j2"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        panels=panels,
        title=title,
        bound=bound,
        y=y,
        width=_WIDTH,
        gap=_GAP,
        left=_LEFT,
        right=_LEFT + len(panels) * (_WIDTH + _GAP) - _GAP,
        top=_TOP,
        bottom=_TOP + _HEIGHT,
        powers=range(low, high + 1),
        lines=[
            *((name, colour, "none") for name, colour in zip(SERIES, _COLOURS, strict=True)),
            (f"theorem 5.3, k = {bound[0]:g}, C = {bound[1]:g}", "#888", "5 3"),
        ],
    )
