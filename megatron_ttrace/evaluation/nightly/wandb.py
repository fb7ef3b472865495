# SPDX-License-Identifier: Apache-2.0
"""One W&B run per night: one row per case, and an alert if a case is bad."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.evaluation.nightly.history import headline
from megatron_ttrace.evaluation.nightly.records import Night, NightPart, State
from megatron_ttrace.report.table import UNMEASURED_MARGIN
from megatron_ttrace.report.wandb import logged
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

COLUMNS = ("part", "case", "state", "reached", "margin", "seconds", "note")


def log(night: Night, changes: Sequence[str], *, directory: Path, online: bool) -> str:
    """Log a night and return one line that says where the run is. Never raises.

    ``changes``, which say what is wrong and what changed, are the text of the alert. The other
    arguments are those of :func:`logged`.
    """
    return logged(
        "night",
        lambda wandb, run: _log(wandb, run, night, changes),
        directory=directory,
        project="ttrace-nightly",
        config={"versions": night.versions, "options": night.options},
        online=online,
    )


def _log(wandb: Any, run: Any, night: Night, changes: Sequence[str]) -> None:
    run.log({"ttrace_nightly": wandb.Table(columns=list(COLUMNS), data=_rows(night))})
    run.summary.update(summary_fields(night))
    if night.bad:
        level = wandb.AlertLevel.ERROR
        run.alert(
            title=f"ttrace nightly: {headline(night)}", text="\n".join(changes)[:4000], level=level
        )


def summary_fields(night: Night) -> dict[str, Any]:
    """By which a table of runs can be sorted and plotted."""
    fields: dict[str, Any] = {
        "nightly/exit_code": int(night.exit_code),
        "nightly/seconds": night.seconds,
    }
    counts = Counter((case.part, case.state) for case in night.cases)
    for part, state in itertools.product(NightPart, State):
        fields[f"nightly/{part}/{state.replace(' ', '_')}"] = counts[part, state]
    culprits = [case.margin for case in night.cases if case.part is NightPart.BUGS and case.margin]
    healthy = [case.margin for case in night.cases if case.part is NightPart.MATRIX and case.margin]
    if culprits:
        fields["nightly/weakest_culprit_margin"] = min(culprits)
    if healthy:
        fields["nightly/worst_healthy_margin"] = max(healthy)
    return fields


def _rows(night: Night) -> list[list[Any]]:
    return [
        [
            case.part.value,
            clean(case.name),
            case.state.value,
            clean(case.marks),
            None if case.margin is None else min(case.margin, UNMEASURED_MARGIN),
            case.seconds,
            clean(case.note, NOTE_LIMIT),
        ]
        for case in night.cases
    ]
