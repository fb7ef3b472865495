# SPDX-License-Identifier: Apache-2.0
"""Everything a check says: files, terminal, HTML, W&B, TensorBoard, JUnit.

The sinks only render :mod:`megatron_ttrace.trace.records`. The two files of the contract must be
written; every other sink fails open, because a report must not kill a training job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_ttrace.report import files, terminal
from megatron_ttrace.trace import shared
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
    junit: bool = False,
    run_id: str | None = None,
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
        junit: whether to write ``junit.xml`` too.
        run_id: id of the run; the summary's own by default, else this process's.

    Raises:
        TTraceError: when ``verdicts.jsonl`` or ``summary.json`` cannot be written.
    """
    directory = Path(directory)
    console = console or Console()
    lines: list[str] = []

    # A summary of an earlier check must not stand beside the verdicts of this one, not even when
    # the job is killed between the two writes.
    files.remove(directory / files.SUMMARY)
    run = run_id or (summary.run.id if summary.run else shared.run_id())
    files.write_verdicts(directory / files.VERDICTS, verdicts, run)
    files.write_summary(directory / files.SUMMARY, summary, run)

    def attempt(sink: str, work: Callable[[], str | None]) -> None:
        try:
            line = work()
        # rich answers a closed pipe with SystemExit, which would end the training job.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - sinks fail open
            line = f"ttrace: WARNING: {sink} failed and was left out: {clean(repr(error), 300)}"
        if line:
            lines.append(line)

    html_path = directory / files.HTML

    def write_html() -> None:
        from megatron_ttrace.report.html import write

        write(html_path, summary, verdicts, run)

    def write_junit() -> None:
        from megatron_ttrace.report.junit import write

        write(directory / files.JUNIT, summary, verdicts, run)

    def log_wandb() -> str:
        from megatron_ttrace.report.wandb import log

        return log(summary, verdicts, html_path, run=wandb_run, directory=directory)

    def log_tensorboard() -> None:
        from megatron_ttrace.report.tensorboard import log

        log(summary, verdicts, tensorboard)

    attempt(files.HTML, write_html)
    if junit:
        attempt(files.JUNIT, write_junit)
    if tensorboard is not None:
        attempt("TensorBoard", log_tensorboard)
    if wandb:
        attempt("W&B", log_wandb)
    attempt("the terminal report", lambda: terminal.render(summary, verdicts, console, directory))
    # The log itself may be gone (a closed pipe); there is nobody left to tell then.
    with contextlib.suppress(Exception, SystemExit):
        for line in lines:
            terminal.say(console, line)
