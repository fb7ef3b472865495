# SPDX-License-Identifier: Apache-2.0
"""How estimated tolerances grow with depth, and the bound of theorem 5.3; with a plot.

The theorem (arXiv 2506.09280) bounds the relative error of the gradient of layer l of L by
O(C^(L + 1 - l) epsilon), because errors accumulate backwards from the loss. Errors of activations
accumulate forwards from the embedding.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

import jinja2

from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.trace.records import Kind, TraceKey

_LAYER = re.compile(r"decoder\.layers\.(\d+)(?:\.(.*))?$")

SERIES: dict[str, tuple[Kind, bool]] = {
    "weight gradients": (Kind.MAIN_GRAD, False),
    "activation gradients": (Kind.GRAD_OUTPUT, True),
    "activations": (Kind.OUTPUT, True),
}
"""Name -> (kind, whether only the layer's own output counts, not what is inside it)."""


_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 260, 220, 44, 26, 14
_COLOURS = ("#1b6ca8", "#c2571a", "#3a7d44")


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """Tolerances of one model: ``by_layer[series][l - 1]`` is layer l's median tolerance."""

    layers: int
    epsilon: float
    by_layer: Mapping[str, tuple[float, ...]]

    def rate(self, series: str) -> float:
        """The factor from a layer to the next deeper one: the slope of the logarithms.

        Gradients run backwards: their factor is from layer l + 1 to l.
        """
        values = self.by_layer[series]
        if len(values) < 2:
            return math.nan
        logs = [math.log(value) for value in values]
        slope = statistics.linear_regression(range(len(logs)), logs).slope
        return math.exp(slope if series == "activations" else -slope)

    def bound(self, k: float, c: float) -> tuple[float, ...]:
        """``k C^(L + 1 - l) epsilon`` for l = 1 to L."""
        return tuple(
            k * c ** (self.layers + 1 - layer) * self.epsilon for layer in range(1, self.layers + 1)
        )


def growth(keys: Iterable[TraceKey], tolerances: Tolerances, layers: int, epsilon: float) -> Growth:
    """The median tolerance of every layer, for each series; blind ones count with their value.

    Raises:
        ValueError: when a layer has no tensor of a series.
    """
    found: dict[str, list[list[float]]] = {name: [[] for _ in range(layers)] for name in SERIES}
    for key in keys:
        match = _LAYER.match(key.name)
        if match is None:
            continue
        for name, (kind, whole) in SERIES.items():
            if key.kind is kind and (not whole or match[2] is None):
                found[name][int(match[1])].append(tolerances.of(key).value)
    for name, per_layer in found.items():
        if not all(per_layer):
            raise ValueError(f"some layer has no {name}")
    return Growth(
        layers,
        epsilon,
        {
            name: tuple(statistics.median(values) for values in per_layer)
            for name, per_layer in found.items()
        },
    )


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
