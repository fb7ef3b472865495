# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: the numbers of a check as scalars, one step an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_ttrace.report import table
from megatron_ttrace.trace.records import Outcome, Summary, Verdict
from megatron_ttrace.trace.sanitise import clean

UNMEASURED_MARGIN = 1e9
"""Stands for a failure without a number; TensorBoard draws no infinities."""


class ScalarWriter(Protocol):
    """What is used of a ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Record one number."""


def log(summary: Summary, verdicts: Sequence[Verdict], writer: ScalarWriter) -> None:
    """Add the worst margin, failures, and the worst margin of each layer, per iteration."""
    by_iteration: dict[int, list[Verdict]] = {}
    for verdict in verdicts:
        by_iteration.setdefault(verdict.iteration, []).append(verdict)
    for iteration, members in sorted(by_iteration.items()):
        failures = sum(verdict.verdict.is_failure for verdict in members)
        unchecked = sum(verdict.verdict is Outcome.UNCHECKED for verdict in members)
        writer.add_scalar("ttrace/failures", failures, iteration)
        writer.add_scalar("ttrace/unchecked", unchecked, iteration)
        worst: dict[str, float] = {}
        for row in table.layer_rows(members):
            if row.group.margin is not None:
                margin = min(row.group.margin, UNMEASURED_MARGIN)
                worst[row.layer] = max(margin, worst.get(row.layer, 0.0))
        if worst:
            writer.add_scalar("ttrace/worst_margin", max(worst.values()), iteration)
        for layer in table.depth_order(worst):
            writer.add_scalar(f"ttrace/margin/{clean(layer, 80)}", worst[layer], iteration)
