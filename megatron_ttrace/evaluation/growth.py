# SPDX-License-Identifier: Apache-2.0
"""How estimated tolerances grow with depth, against the bound of theorem 5.3.

The theorem (arXiv 2506.09280) bounds the relative error of the gradient of layer l of L by
O(C^(L + 1 - l) epsilon): errors pile up from the loss backwards. Forward activations pile up from
the embedding on.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Mapping

from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.trace.records import Kind, TraceKey

_LAYER = re.compile(r"decoder\.layers\.(\d+)(?:\.(.*))?$")

SERIES: dict[str, tuple[Kind, bool]] = {
    "weight gradients": (Kind.MAIN_GRAD, False),
    "activation gradients": (Kind.GRAD_OUTPUT, True),
    "activations": (Kind.OUTPUT, True),
}
"""Name -> (kind, whether only the layer's own output counts, not what is inside it)."""


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
