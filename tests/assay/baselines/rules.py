# SPDX-License-Identifier: Apache-2.0
"""Other tools' rules for "the same", each written from its published definition.

docs/alternatives.md names the sources, and what each rule misses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from megatron_ttrace.report.table import split_name
from megatron_ttrace.trace.records import Kind, TraceKey
from tests.assay.baselines.statistics import Stats

THEOREM_K = 4.0
THEOREM_C = 1.03
THEOREM_LAYERS = 32
MSPROBE = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class RunFacts:
    """What a rule may know of the run: number of layers, machine epsilon of the compute dtype."""

    layers: int
    epsilon: float


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """``flags(key, stats, run)``: whether the tool would call the tensor different."""

    name: str
    flags: Callable[[TraceKey, Stats, RunFacts], bool]


def rel_diff(stats: Stats) -> float:
    """``1 - 2 sum(xy) / sum(x^2 + y^2)``, quadratic in the relative error (sglang, DeepGEMM)."""
    total = stats.candidate + stats.reference
    return stats.diff / total if total else 0.0


def _beyond(threshold: float) -> Callable[[TraceKey, Stats, RunFacts], bool]:
    return lambda key, stats, run: stats.nonfinite > 0 or rel_diff(stats) > threshold


def theorem_bound(exponent: float, epsilon: float) -> float:
    """``k C^exponent epsilon`` with the constants of Megatron's gradient test."""
    return THEOREM_K * math.pow(THEOREM_C, exponent) * epsilon


def _theorem_fixed(key: TraceKey, stats: Stats, run: RunFacts) -> bool:
    """One bound for every layer: that of the first of 32."""
    del key
    bound = theorem_bound(THEOREM_LAYERS + 1, run.epsilon)
    return stats.nonfinite > 0 or stats.relative_error > bound


def _theorem_depth(key: TraceKey, stats: Stats, run: RunFacts) -> bool:
    """``C^(L + 1 - l)`` with the model's number of layers L and the tensor's layer l."""
    bound = theorem_bound(run.layers + 1 - depth(key, run.layers), run.epsilon)
    return stats.nonfinite > 0 or stats.relative_error > bound


def depth(key: TraceKey, layers: int) -> int:
    """l of a tensor: 1 to L for layers, 0 before them, L + 1 after them.

    The theorem bounds gradients, whose errors accumulate from the loss backwards. Tensors of the
    forward pass get the loosest bound, that of l = 0.
    """
    gradients = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.MAIN_GRAD)
    if key.kind not in gradients:
        return 0
    number = split_name(key.name)[0].rpartition(".")[2]
    if number.isdigit():
        return int(number) + 1
    return 0 if "embedding" in key.name else layers + 1


def _msprobe(key: TraceKey, stats: Stats, run: RunFacts) -> bool:
    """Whether the largest, smallest or mean element or the norm differ by more than half.

    NaN on either side, or zero in the reference, is not flagged: there is no relative difference.
    """
    del key, run
    pairs = [
        *zip(stats.extremes, stats.reference_extremes, strict=True),
        (math.sqrt(stats.candidate), math.sqrt(stats.reference)),
    ]
    return not stats.nonfinite and any(r != 0.0 and abs(c - r) / abs(r) > MSPROBE for c, r in pairs)


def _msprobe_outputs(key: TraceKey, stats: Stats, run: RunFacts) -> bool:
    """As the tool does since 26.2: modules' outputs and input gradients only."""
    return key.kind in (Kind.OUTPUT, Kind.GRAD_INPUT) and _msprobe(key, stats, run)


def _assert_close(key: TraceKey, stats: Stats, run: RunFacts) -> bool:
    """Whether a single element is beyond ``atol + rtol |r|``."""
    del key, run
    return stats.nonfinite > 0 or stats.far > 0


RULES = (
    Rule("sglang rel_diff 1e-3", _beyond(1e-3)),
    Rule("miles 2e-3", _beyond(2e-3)),
    Rule("miles 8.5e-3", _beyond(8.5e-3)),
    Rule("theorem 5.3, depth fixed at 32", _theorem_fixed),
    Rule("theorem 5.3, own depth", _theorem_depth),
    Rule("msprobe first difference, outputs", _msprobe_outputs),
    Rule("msprobe first difference, all tensors", _msprobe),
    Rule("torch.testing.assert_close", _assert_close),
)
