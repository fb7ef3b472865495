# SPDX-License-Identifier: Apache-2.0
"""The outputs of a check: files, terminal, HTML, W&B, TensorBoard.

They only render :mod:`megatron_ttrace.trace.records`. The two files of the contract must be
written. Every other output fails open, because a report must not kill a training job.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_ttrace.report import terminal
from megatron_ttrace.trace import files, shared
from megatron_ttrace.trace.collectives import Collective
from megatron_ttrace.trace.records import Summary, Verdict
from megatron_ttrace.trace.sanitise import clean

__all__ = ["publish"]


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
    """Write, log and print the report of a check.

    Args:
        summary: the answer.
        verdicts: all verdicts, in execution order.
        directory: the ``--ttrace-dir``; made when absent.
        wandb_run: W&B run to log into, e.g. Megatron's own; ``None`` finds or makes one.
        tensorboard: a ``SummaryWriter`` to add scalars to.
        console: where to print; standard output by default.
        wandb: whether to log to W&B at all.
        wandb_online: whether a W&B run of our own may be sent to the server.
        run_id: id of the run; the summary's own by default, else this process's.
        collectives: those of the traced steps; ``None`` writes no file of them.
        pages: whether to make the HTML page and a W&B run of our own; else
            :mod:`megatron_ttrace.report.later` does so from the files.

    Raises:
        TTraceError: when ``verdicts.jsonl`` or ``summary.json`` cannot be written.
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
    logs_to_job = wandb_run is not None

    def write_html() -> None:
        from megatron_ttrace.report.html import write

        write(page, summary, verdicts, run)

    def log_tensorboard() -> None:
        from megatron_ttrace.report.tensorboard import log

        log(summary, verdicts, tensorboard)

    def log_wandb() -> str:
        from megatron_ttrace.report.wandb import log

        return log(summary, verdicts, page, run=wandb_run, directory=directory, online=wandb_online)

    sinks: list[tuple[bool, str, Callable[[], str | None]]] = [
        (pages or (wandb and logs_to_job), files.HTML, write_html),
        (tensorboard is not None, "TensorBoard", log_tensorboard),
        (wandb and (pages or logs_to_job), "W&B", log_wandb),
        (
            True,
            "the terminal report",
            lambda: terminal.render(summary, verdicts, console, directory),
        ),
    ]
    lines: list[str | None] = []
    for wanted, sink, work in sinks:
        try:
            lines.append(work() if wanted else None)
        # rich answers a closed pipe with SystemExit, which would end the training job.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - sinks fail open
            why = clean(repr(error), 300)
            lines.append(f"ttrace: WARNING: {sink} failed and was left out: {why}")
    # The log itself may be gone (a closed pipe); then there is nowhere left to report to.
    with contextlib.suppress(Exception, SystemExit):
        for line in filter(None, lines):
            terminal.say(console, line)
