# SPDX-License-Identifier: Apache-2.0
"""The outputs of a check: files, terminal, HTML, W&B, TensorBoard.

They only render :mod:`megatron_ttrace.trace.records`. The two files of the contract must be
written. Every other output fails open, because a report must not kill a training job.
"""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_ttrace.report import table, terminal
from megatron_ttrace.trace import files, shared
from megatron_ttrace.trace.collectives import Collective
from megatron_ttrace.trace.records import Summary, Verdict
from megatron_ttrace.trace.sanitise import clean

__all__ = ["log_scalars", "prepare", "publish"]


def prepare(*, wandb: bool) -> None:
    """Import what :func:`publish` needs for the page and for W&B. Never raises.

    For a process that waits anyway: both together take longer than the verdict.
    """
    with contextlib.suppress(Exception):  # what is missing is reported when it is needed
        from megatron_ttrace.report import html

        html.template()
        if wandb:
            # Its first use imports it, where ranks are forks (``jobs/processes/forkserver.py``).
            _ = importlib.import_module("wandb").init


def publish(
    summary: Summary,
    verdicts: Sequence[Verdict],
    directory: Path,
    *,
    wandb_run: Any = None,
    tensorboard: Any = None,
    console: Console | None = None,
    wandb: bool = True,
    wandb_online: bool = False,
    run_id: str | None = None,
    collectives: Sequence[Collective] | None = None,
    pages: bool = True,
) -> None:
    """Write, log and print the report of a check; ``verdicts`` are in execution order.

    Unless ``wandb`` is false, it is logged to ``wandb_run``, e.g. Megatron's own, else to a W&B run
    of our own, if one is wanted; ``wandb_online`` asks for one that is sent to the server.
    ``tensorboard`` is a ``SummaryWriter``, ``run_id`` by default the summary's own, else this
    process's. Without ``collectives`` no file of them is written; without ``pages``,
    :mod:`megatron_ttrace.report.later` makes the HTML page and a W&B run of our own.

    Raises ``TTraceError`` when ``verdicts.jsonl`` or ``summary.json`` cannot be written.
    """
    console = console or Console()
    # A summary of an earlier check must never be beside the verdicts of this one, even if the job
    # is killed between the two writes.
    files.remove(directory / files.SUMMARY)
    run = run_id or (summary.run.id if summary.run else shared.run_id())
    files.write_records(directory / files.VERDICTS, verdicts, run)
    if collectives is not None:
        files.write_records(directory / files.COLLECTIVES, collectives, run)
    files.write_summary(directory / files.SUMMARY, summary, run)
    page = directory / files.HTML
    if not pages:
        files.remove(page)

    def write_html() -> None:
        from megatron_ttrace.report.html import write

        write(page, summary, verdicts, run)

    def log_wandb() -> str:
        from megatron_ttrace.report.wandb import log

        return log(summary, verdicts, page, run=wandb_run, directory=directory, online=wandb_online)

    logs_to_job = wandb and wandb_run is not None
    sinks: dict[str, Callable[[], str | None]] = {}
    if pages or logs_to_job:
        sinks[files.HTML] = write_html
    if tensorboard is not None:
        sinks["TensorBoard"] = lambda: log_scalars(summary, verdicts, tensorboard)
    if logs_to_job or (wandb and pages):
        sinks["W&B"] = log_wandb
    sinks["the terminal report"] = lambda: terminal.render(summary, verdicts, console, directory)
    lines: list[str | None] = []
    for name, write in sinks.items():
        try:
            lines.append(write())
        # rich answers a closed pipe with SystemExit, which would end the training job.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - sinks fail open
            why = clean(repr(error), 300)
            lines.append(f"ttrace: WARNING: {name} failed and was left out: {why}")
    # The log itself may be gone (a closed pipe); then there is nowhere left to report to.
    with contextlib.suppress(Exception, SystemExit):
        for line in filter(None, lines):
            terminal.say(console, line)


def log_scalars(summary: Summary, verdicts: Sequence[Verdict], writer: Any) -> None:
    """Add margins and failures, per iteration and layer, to TensorBoard's ``SummaryWriter``."""
    for iteration in sorted({verdict.iteration for verdict in verdicts}):
        members = [verdict for verdict in verdicts if verdict.iteration == iteration]
        group = table.Group.of(members)
        writer.add_scalar("ttrace/failures", group.failures, iteration)
        writer.add_scalar("ttrace/unchecked", group.unchecked, iteration)
        margins = table.layer_margins(table.layer_rows(members))
        if margins:
            writer.add_scalar("ttrace/worst_margin", max(margins.values()), iteration)
        for layer, margin in margins.items():
            writer.add_scalar(f"ttrace/margin/{clean(layer, 80)}", margin, iteration)
