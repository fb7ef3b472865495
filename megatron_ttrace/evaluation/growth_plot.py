# SPDX-License-Identifier: Apache-2.0
"""A plain SVG of tolerances over depth: one panel for each depth, logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from megatron_ttrace.evaluation.growth import SERIES, Growth

_WIDTH, _HEIGHT = 260, 220
_LEFT, _TOP, _BOTTOM, _GAP = 44, 26, 34, 14
_COLOURS = ("#1b6ca8", "#c2571a", "#3a7d44")
_BOUND = "#888"


def svg(panels: Sequence[Growth], title: str, bound: tuple[float, float]) -> str:
    """Draw one panel for each model; ``bound`` are k and C of the dashed line."""
    lines = [g.bound(*bound) for g in panels]
    values = [v for g in panels for s in g.by_layer.values() for v in s]
    values += [v for line in lines for v in line]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    width = len(panels) * (_WIDTH + _GAP) + _LEFT
    height = _HEIGHT + _TOP + _BOTTOM + 20 * 2
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="11"><title>{escape(title)}</title>'
        '<rect width="100%" height="100%" fill="#fff"/>'
    ]

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (high - math.log10(value)) / (high - low)

    for power in range(low, high + 1):
        at = y(10.0**power)
        out.append(
            f'<path d="M{_LEFT} {at:.1f}H{width - _GAP}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>'
        )
    for position, (grown, line) in enumerate(zip(panels, lines, strict=True)):
        left = _LEFT + position * (_WIDTH + _GAP)
        out.append(_panel(grown, line, left, y))
    legend_y = _TOP + _HEIGHT + _BOTTOM + 12
    entries = [*zip(SERIES, _COLOURS, strict=True)]
    entries.append((f"theorem 5.3, k = {bound[0]:g}, C = {bound[1]:g}", _BOUND))
    for number, (name, colour) in enumerate(entries):
        x, at = _LEFT + (number % 2) * 200, legend_y + 18 * (number // 2)
        dash = ' stroke-dasharray="5 3"' if colour == _BOUND else ""
        out.append(
            f'<path d="M{x} {at - 4}h24" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{x + 30}" y="{at}">{escape(name)}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def _panel(grown: Growth, line: Sequence[float], left: float, y: object) -> str:
    assert callable(y)
    step = _WIDTH / max(grown.layers - 1, 1)

    def points(values: Sequence[float]) -> str:
        return " ".join(f"{left + n * step:.1f},{y(v):.1f}" for n, v in enumerate(values))

    drawn = [
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#bbb"/>',
        f'<text x="{left + _WIDTH / 2}" y="{_TOP - 8}" text-anchor="middle">{grown.layers} layers'
        "</text>",
        f'<text x="{left}" y="{_TOP + _HEIGHT + 15}">layer 1</text>',
        f'<text x="{left + _WIDTH}" y="{_TOP + _HEIGHT + 15}" text-anchor="end">{grown.layers}'
        "</text>",
        f'<polyline points="{points(line)}" fill="none" stroke="{_BOUND}" stroke-dasharray="5 3"/>',
    ]
    drawn += [
        f'<polyline points="{points(grown.by_layer[name])}" fill="none" stroke="{colour}" '
        'stroke-width="1.6"/>'
        for name, colour in zip(SERIES, _COLOURS, strict=True)
    ]
    return "\n".join(drawn)
