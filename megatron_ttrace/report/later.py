# SPDX-License-Identifier: Apache-2.0
"""The HTML page and a W&B run of our own, made by a process beside a training job that goes on.

A thread would hold Python's lock while the next iterations need it. The process reads the files of
the verdict, which are complete by then, and outlives a job that is killed soon after its check. It
has a low priority and an end: :data:`SECONDS`.
"""

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
    if not (html or wandb):
        return
    wanted = {"html": html, "wandb": wandb, "online": online}
    words = [str(directory.resolve()), *(name for name in wanted if wanted[name])]
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, *words],
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
    """Make what is asked for in a directory, and print one line about each."""
    signal.alarm(SECONDS)
    os.nice(10)
    directory, wanted = Path(words[0]), words[1:]
    page = directory / files.HTML
    try:
        summary, verdicts = files.load_report(directory)
        if "html" in wanted:
            from megatron_ttrace.report.html import write

            write(page, summary, verdicts, files.run_of(directory))
            print(f"ttrace: report: {clean(page, NOTE_LIMIT)}", flush=True)
        if "wandb" in wanted:
            from megatron_ttrace.report.wandb import log

            online = "online" in wanted
            print(log(summary, verdicts, page, directory=directory, online=online), flush=True)
    except Exception as error:  # noqa: BLE001 - the verdict itself is complete
        print(f"ttrace: WARNING: the report was left out: {one_line(error)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
