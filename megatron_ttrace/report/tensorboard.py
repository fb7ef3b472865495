# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: the numbers of a check as scalars, one step per iteration."""

from collections.abc import Sequence
from typing import Any

from megatron_ttrace.report import table
from megatron_ttrace.trace.records import Outcome, Summary, Verdict
from megatron_ttrace.trace.sanitise import clean


def log(summary: Summary, verdicts: Sequence[Verdict], writer: Any) -> None:
    """Add margins and failures, per iteration and layer, to a ``SummaryWriter``."""
    by_iteration: dict[int, list[Verdict]] = {}
    for verdict in verdicts:
        by_iteration.setdefault(verdict.iteration, []).append(verdict)
    for iteration, members in sorted(by_iteration.items()):
        failures = sum(verdict.verdict.is_failure for verdict in members)
        unchecked = sum(verdict.verdict is Outcome.UNCHECKED for verdict in members)
        writer.add_scalar("ttrace/failures", failures, iteration)
        writer.add_scalar("ttrace/unchecked", unchecked, iteration)
        margins = table.layer_margins(table.layer_rows(members))
        if margins:
            writer.add_scalar("ttrace/worst_margin", max(margins.values()), iteration)
        for layer, margin in margins.items():
            writer.add_scalar(f"ttrace/margin/{clean(layer, 80)}", margin, iteration)
