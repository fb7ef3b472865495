# SPDX-License-Identifier: Apache-2.0
"""What the campaign measures and keeps before it injects anything: runs without a fault."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests import ranks
from tests.assay.faults.fault import Family, Fault, text
from tests.assay.faults.processes import Command, Started, bury
from tests.assay.planted import train
from tests.integration import jobs

NPROC = 2
# Long sequences: Megatron's mock data set gets more samples, and slower, with short ones.
JOB = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 "
    "--lr 1e-3 --lr-warmup-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 "
    "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--log-interval 1 --tensor-model-parallel-size 2 --train-iters 2"
).split()
SAVED = ("--ckpt-format", "torch_dist", "--lr-decay-iters", "10")
CONTINUED = ("--train-iters", "6", "--override-opt_param-scheduler")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp": jobs.TP,
    "pp": jobs.PP,
    "zero": jobs.ZERO,
    "fsdp": (
        *("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"),
        *("--data-parallel-sharding-strategy", "optim_grads_params"),
    ),
    "experts": (
        *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"),
        *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "1e-2"),
        "--disable-bias-linear",
    ),
    "fp8": (
        *("--fp8-format", "hybrid", "--bf16", "--transformer-impl", "transformer_engine"),
        *("--fp8-recipe", "delayed", *jobs.TP),
    ),
    # Without --ttrace this flag does nothing.
    "exit": (*jobs.TP, "--ttrace-exit"),
    "saved": (*jobs.TP, *SAVED, "--save", "CHECKPOINT", "--save-interval", "3"),
    "load": (*jobs.TP, *SAVED, "--load", "CHECKPOINT", *CONTINUED),
}
"""Layouts of trainings on two ranks."""
TRACED = ("--ttrace", "--ttrace-no-wandb", "--ttrace-dir", "out", "--ttrace-iterations", "1-2")
"""Flags of a training that is traced."""
BUG = "01"
"""The known bug of faulty candidates; every layout with tensor parallelism has it."""
PATIENCE = 600.0
IDLE_SECONDS = 5.0
"""No run without a fault takes longer on two idle cores."""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Healthy runs' traces and durations.

    Attributes:
        folder: ``cache`` (a shared cache with one reference), ``other`` (one of another
            configuration), ``healthy`` and ``faulty`` (traces of a check each), ``local`` (a cache
            for trainings), ``checkpoint``.
        fresh: seconds of a check that makes its reference.
        cached: seconds of a check that finds it.
        start: seconds that a cold start takes before it.
        trained: seconds of a traced training by layout, without and with a cached reference.
        bits: what an untraced training logs, by layout.
    """

    folder: Path
    fresh: float = 1.0
    cached: float = 1.0
    start: float = 1.0
    trained: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    bits: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @property
    def slowness(self) -> float:
        """How many times as long as on an idle machine a run takes, at least 1."""
        longest = max(self.fresh, *(fresh for fresh, _ in self.trained.values()), IDLE_SECONDS)
        return longest / IDLE_SECONDS

    def scaled(self, factor: float) -> Baseline:
        """The same on a machine that takes so many times as long."""
        trained = {name: (factor * a, factor * b) for name, (a, b) in self.trained.items()}
        times = {name: factor * getattr(self, name) for name in ("fresh", "cached", "start")}
        return dataclasses.replace(self, trained=trained, **times)  # type: ignore[arg-type]


class NoBaselineError(Exception):
    """A run without any fault did not do what it should: there is nothing to measure by."""


def check(
    home: Path,
    *flags: str,
    directory: str = "out",
    cache: Path | None = None,
    faulty: bool = False,
    script: Path | str = train.SCRIPT,
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


def training(
    base: Baseline,
    home: Path,
    layout: str,
    *flags: str,
    cache: Path,
    order: Mapping[str, object] | None = None,
) -> Command:
    """A training whose ranks print their bits; its launcher does as torchrun would."""
    checkpoint = str(base.folder / "checkpoint")
    words = [word.replace("CHECKPOINT", checkpoint) for word in LAYOUTS[layout]]
    return Command(
        words=(str(NPROC), train.__file__, *jobs.TINY, *words, *flags),
        home=home,
        script=Path(ranks.__file__),
        variables={
            "TTRACE_CACHE": str(cache),
            ranks.LOGS: str(home / "logs"),
            train.ORDER: json.dumps({"bits": True, **(order or {})}),
        },
    )


def ended(home: Path) -> tuple[list[int | None], list[str]]:
    """Exit codes (none if the launcher did not end) and output of a training's ranks."""
    file = home / "logs" / "codes.json"
    codes = json.loads(file.read_text()) if file.exists() else []
    return codes, [text(log) for log in sorted((home / "logs").glob("rank-*.log"))]


def prepare(folder: Path, faults: Collection[Fault], start: float, *, other: bool) -> Baseline:
    """Make the runs that these faults need; ``other``: also one of another configuration.

    Raises:
        NoBaselineError: when a run without a fault fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cache, base = folder / "cache", Baseline(folder)
    layouts = {fault.layout for fault in faults} - {""}
    if {fault.family for fault in faults} - _NO_CHECKS:
        fresh = _run(folder / "healthy", 0, "--ttrace-save-candidate", cache=cache)
        cached = _run(folder / "cached", 0, cache=cache)
        base = dataclasses.replace(base, fresh=fresh, cached=cached, start=start)
    if any(fault.action.arguments.get("offline") for fault in faults):
        saves = "--ttrace-save-candidate"
        _run(folder / "faulty", 1, saves, cache=cache, faulty=True)
        # A command that refuses everything would refuse what is damaged, too.
        for name, code in (("healthy", 0), ("faulty", 1)):
            _compare(folder / name, code)
    if other:
        _run(folder / "another", 0, cache=folder / "other", job=("--seed", "4321"))
    return _trained(base, layouts) if layouts else base


_NO_CHECKS = {Family.LOCAL, Family.TRAINING, Family.INPUTS, Family.FOREIGN}


def _run(home: Path, code: int, *flags: str, **more: object) -> float:
    home.mkdir(parents=True)
    return _end(Started(check(home, *flags, **more)), code)  # type: ignore[arg-type]


def _compare(home: Path, code: int) -> None:
    words = ("compare", "out/reference", "out/candidate", "--output", "compared")
    _end(Started(Command(words=words, home=home, name="compare")), code)


def _end(started: Started, code: int) -> float:
    """Seconds that a run took; it leaves nothing behind."""
    started.wait(PATIENCE)
    left = bury(60)
    if started.code != code or left:
        stderr = text(started.command.output("stderr"))
        name = started.command.home.name
        raise NoBaselineError(f"{name}: exit code {started.code}, not {code}: {stderr[-2000:]}")
    assert started.ended is not None
    return started.ended - started.began


def _trained(base: Baseline, layouts: Collection[str]) -> Baseline:
    """Bits of untraced trainings, which traced ones must log as well."""
    bits, seconds = {}, {}
    if "load" in layouts:
        _train(base, "saved", "saved")
    for layout in sorted({"tp", *layouts}):
        bits[layout], _ = _train(base, f"{layout}-untraced", layout)
        flags = ["--ttrace", "--ttrace-no-wandb", "--ttrace-dir", "out"]
        if layout == "exit":  # as "tp", whose reference it has
            continue
        flags += ["--ttrace-iterations", "1-2" if layout != "load" else "4"]
        traced, fresh = _train(base, f"{layout}-traced", layout, *flags)
        _, cached = _train(base, f"{layout}-cached", layout, *flags)
        if traced != bits[layout] or len(traced) < 2 * NPROC:
            raise NoBaselineError(f"traced and untraced training differ: {layout}: {traced}")
        seconds[layout] = (fresh, cached)
    return dataclasses.replace(base, bits=bits, trained=seconds)


def _train(base: Baseline, name: str, layout: str, *flags: str) -> tuple[list[str], float]:
    home = base.folder / name
    home.mkdir()
    command = training(base, home, layout, *flags, cache=base.folder / "local")
    took = _end(Started(command), 0)
    return jobs.bits_of("".join(ended(home)[1])), took
