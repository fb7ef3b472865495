# SPDX-License-Identifier: Apache-2.0
"""Put a mistake into a real job, check it, and say whether the check noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.faults.field.rows import Row, said_wrongly
from tests.integration import jobs
from tests.planted.mistakes import MARK, PLANTED, Mistake, load

NUMERIC = [mistake for mistake in load().values() if mistake.job and not mistake.is_feature]


def has_effect(mistake: Mistake, folder: Path) -> bool:
    """Whether losses, gradient norms or weights of three untraced steps differ in a bit."""
    folder.mkdir(parents=True)
    nproc, words = mistake.arguments(folder)
    runs = [
        jobs.train(folder, *words, nproc=nproc, **more)
        for more in ({PLANTED: mistake.id}, {})  # type: ignore[arg-type]
    ]
    return jobs.bits_of(runs[0].stdout) != jobs.bits_of(runs[1].stdout)


def plant(mistake: Mistake, folder: Path) -> Row:
    """Check the job with the mistake in it: it must diverge."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark = folder / "mark"
    nproc, arguments = mistake.arguments(folder)
    words = ("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", nproc, "--", jobs.TRAIN)
    variables = {MARK: str(mark), PLANTED: mistake.id}
    done = jobs.ttrace(*words, *arguments, cwd=folder, timeout=400, **variables)
    problems = [] if done.returncode == 1 else [f"exit code {done.returncode}"]
    problems += said_wrongly(done.stdout + done.stderr)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return Row(mistake.id, "numeric", mark.exists(), tuple(problems), " | ".join(lines[-3:])[:600])
