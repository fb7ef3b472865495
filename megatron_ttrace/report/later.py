# SPDX-License-Identifier: Apache-2.0
"""The HTML page and a W&B run of our own, made by a process beside a training job that goes on.

A thread would hold Python's lock while the next iterations need it. The process reads the files of
the verdict, which are complete by then, and outlives a job that is killed soon after its check. It
has a low priority and an end: :data:`SECONDS`.
"""

import argparse
import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ttrace.trace import files
from megatron_ttrace.trace.errors import one_line
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

SECONDS = 180
"""The process ends after this time. A job that ends earlier waits for it so long."""


def start(directory: Path, *, html: bool, wandb: bool, online: bool) -> None:
    """Start the process; this one waits for it when it ends. Never raises."""
    wanted = {"--html": html, "--wandb": wandb, "--online": online}
    if not (html or wandb):
        return
    words = [
        "-m",
        __spec__.name,
        str(directory.resolve()),
        *(flag for flag in wanted if wanted[flag]),
    ]
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", *words],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        print(f"ttrace: WARNING: no {files.HTML} was made: {one_line(error)}", flush=True)
        return
    atexit.register(_wait, process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        print(f"ttrace: WARNING: process {process.pid} still writes the report", flush=True)


def main(words: Sequence[str]) -> None:
    """Make what is asked for, and print one line about each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    for flag in ("--html", "--wandb", "--online"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args(words)
    signal.alarm(SECONDS)
    os.nice(10)
    directory: Path = args.directory
    page = directory / files.HTML
    try:
        summary, verdicts = files.load_report(directory)
        if args.html:
            from megatron_ttrace.report.html import write

            write(page, summary, verdicts, files.run_of(directory))
            print(f"ttrace: report: {clean(page, NOTE_LIMIT)}", flush=True)
        if args.wandb:
            from megatron_ttrace.report.wandb import log

            print(log(summary, verdicts, page, directory=directory, online=args.online), flush=True)
    except Exception as error:  # noqa: BLE001 - the verdict itself is complete
        print(f"ttrace: WARNING: the report was left out: {one_line(error)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
