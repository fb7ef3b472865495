# SPDX-License-Identifier: Apache-2.0
"""What the campaign measures and keeps before it injects anything: runs without a fault."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.faults.faults import Family
from tests.faults.processes import Command, Started, bury
from tests.integration import jobs
from tests.planted import train as training

SCRIPT = training.SCRIPT
NPROC = 2
# Long sequences: Megatron's mock data set gets more samples, and slower, with short ones.
JOB = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 "
    "--lr 1e-3 --lr-warmup-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 "
    "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--log-interval 1 --tensor-model-parallel-size 2 --train-iters 2"
).split()
BUG = "01"
"""The known bug of faulty candidates; every layout with tensor parallelism has it."""
PATIENCE = 150.0


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Healthy runs' traces and durations.

    Attributes:
        folder: ``cache`` (a shared cache with one reference), ``other`` (one of another
            configuration), ``healthy`` and ``faulty`` (traces of a check each), ``local`` (a cache
            for training runs).
        fresh: seconds of a check that makes its reference.
        cached: seconds of a check that finds it.
        start: seconds that a cold start takes before it.
        bits: what an untraced training run logs.
        functions: by rank, the functions of ours that a traced one calls, and how often.
    """

    folder: Path
    fresh: float
    cached: float
    start: float
    bits: tuple[str, ...] = ()
    functions: tuple[tuple[tuple[str, int], ...], ...] = ()


class NoBaselineError(Exception):
    """A run without any fault did not do what it should: there is nothing to measure by."""


def check(
    home: Path,
    *flags: str,
    directory: str = "out",
    cache: Path | None = None,
    faulty: bool = False,
    script: Path = SCRIPT,
    job: Sequence[str] = (),
    **more: object,
) -> Command:
    """``ttrace check`` of the campaign's job."""
    words = ("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", str(NPROC))
    words += ("--ttrace-dir", directory, *flags)
    if faulty:
        words += ("--ttrace-bug", BUG)
    variables = {"TTRACE_CACHE": None if cache is None else str(cache)}
    variables |= more.pop("variables", {})  # type: ignore[arg-type]
    return Command(
        words=(*words, "--", str(script), *JOB, *job),
        home=home,
        variables=variables,
        **more,  # type: ignore[arg-type]
    )


def train(
    home: Path, order: dict[str, object], *flags: str, cache: Path, limit: float
) -> tuple[list[int | None], bool]:
    """Train with the ranks as forks, as torchrun would: one that fails ends the others.

    Returns their exit codes (``None``: ended by us), and whether the job hung.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        Started(
            Command(
                words=(*JOB, *flags),
                home=home,
                name=f"rank-{rank:05d}",
                script=Path(training.__file__),
                variables={
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(NPROC),
                    "LOCAL_WORLD_SIZE": str(NPROC),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "TTRACE_CACHE": str(cache),
                    training.ORDER: json.dumps(order),
                },
            )
        )
        for rank in range(NPROC)
    ]
    deadline = time.monotonic() + limit
    # torchrun ends the others when it notices, which is within a second or so.
    grace: float | None = None
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if grace is None and any(rank.code for rank in ranks):
            grace = time.monotonic() + 1.0
        if grace is not None and time.monotonic() > grace:
            break
        time.sleep(0.02)
    codes = [rank.poll() for rank in ranks]
    bury(0)
    return codes, grace is None and None in codes


def bits_of(home: Path) -> tuple[str, ...]:
    """What all ranks of a training run logged."""
    logs = home.glob("rank-*.stdout.txt")
    return tuple(jobs.bits_of("".join(log.read_text(errors="replace") for log in logs)))


def prepare(folder: Path, families: Collection[Family], start: float) -> Baseline:
    """Make the runs that the faults of these families need.

    Raises:
        NoBaselineError: when a run without a fault fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    cache = folder / "cache"
    fresh = _run(folder / "healthy", 0, "--ttrace-save-candidate", cache=cache)
    cached = _run(folder / "cached", 0, cache=cache)
    baseline = Baseline(folder, fresh, cached, start)
    if Family.CACHE in families:
        saves = "--ttrace-save-candidate"
        _run(folder / "faulty", 1, saves, cache=cache, faulty=True)
        # A command that refuses everything would refuse what is damaged, too.
        for name, code in (("healthy", 0), ("faulty", 1)):
            _compare(folder / name, code)
    if families & {Family.CACHE, Family.DISK}:
        _run(folder / "another", 0, cache=folder / "other", job=("--seed", "4321"))
    if Family.LOCAL in families:
        baseline = dataclasses.replace(baseline, **_training(folder))
    return baseline


def _run(home: Path, code: int, *flags: str, **more: object) -> float:
    home.mkdir(parents=True)
    started = Started(check(home, *flags, **more))  # type: ignore[arg-type]
    started.wait(PATIENCE)
    left = bury(5)
    if started.code != code or left:
        said = started.command.output("stderr").read_text(errors="replace")
        raise NoBaselineError(f"{home.name}: exit code {started.code}, not {code}: {said[-2000:]}")
    assert started.ended is not None
    return started.ended - started.began


def _compare(home: Path, code: int) -> None:
    words = ("compare", "out/reference", "out/candidate", "--output", "compared")
    started = Started(Command(words=words, home=home, name="compare"))
    started.wait(PATIENCE)
    if started.code != code:
        said = started.command.output("stderr").read_text(errors="replace")
        raise NoBaselineError(f"{home.name}, offline: exit code {started.code}: {said[-2000:]}")


def _training(folder: Path) -> dict[str, object]:
    """Bits of an untraced run, and the functions of a traced one, which must log the same bits."""
    cache = folder / "local"
    found = []
    for name, flags in (("plain", ()), ("traced", ("--ttrace", "--ttrace-no-wandb"))):
        home = folder / name
        home.mkdir()
        order: dict[str, object] = {"bits": True}
        if flags:
            made = Started(
                check(
                    folder / "healthy",
                    directory="for-training",
                    cache=cache,
                    script=Path(training.__file__),
                )
            )
            made.wait(PATIENCE)
            order |= {
                str(rank): {"record": str(home / f"calls-{rank}.json")} for rank in range(NPROC)
            }
        codes, hung = train(home, order, *flags, cache=cache, limit=PATIENCE)
        if hung or any(codes):
            said = (home / "rank-00000.stderr.txt").read_text(errors="replace")
            raise NoBaselineError(f"{name} training: exit codes {codes}: {said[-2000:]}")
        found.append(bits_of(home))
    if found[0] != found[1] or len(found[0]) < 2:
        raise NoBaselineError(f"traced and untraced training differ: {found}")
    functions = tuple(
        tuple(sorted(json.loads((folder / "traced" / f"calls-{rank}.json").read_text()).items()))
        for rank in range(NPROC)
    )
    return {"bits": found[0], "functions": functions}
