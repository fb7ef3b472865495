# SPDX-License-Identifier: Apache-2.0
"""What is measured. Each section yields rows; every ratio is of one run, in turns."""

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.bench import jobs, probe
from tests.bench.jobs import BASE, BF16, LARGE, PP2, SCRIPT, TP2, BenchError, Job, scratch

_MB = 1e6
_SIDE = 4096
"""Of the matrices that are compared: 67 MB in fp32, more than any cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        section: that it belongs to.
        name: unique in its section, the same in every run.
        value: a ratio, or a number of ``unit``; smaller is better. ``None``: not measured.
        unit: of the value.
        note: what else is known.
    """

    section: str
    name: str
    value: float | None
    unit: str
    note: str = ""

    @property
    def is_ratio(self) -> bool:
        """Whether it can be compared between machines."""
        return self.unit.startswith("×")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How much is measured: ``pairs`` of each comparison; the jobs whose names hold ``only``."""

    pairs: int = 5
    only: str = ""


def traced_step(options: Options) -> Iterator[Row]:
    """An iteration that is traced (rehearsal, comparison, the real step), against a plain one."""
    for job in (BASE, TP2, PP2, BF16, LARGE):
        if options.only not in job.name:
            continue
        with scratch() as home:
            turns = jobs.in_turns(job, "ttrace", options.pairs, home)
            of_run = functools.partial(Row, "traced-step")
            step = jobs.median_ratio(turns.steps, turns.plain)
            plain = statistics.median(turns.plain)
            note = f"a plain iteration takes {plain:.2f} s"
            yield of_run(f"{job.name}: traced iteration", turns.ratio, "× plain", note)
            yield of_run(f"{job.name}: its traced step alone", step, "× plain")
            memory = turns.peak / _MB
            note = f"plain {turns.plain_peak / _MB:.0f} MB; {turns.peak_mapped / _MB:.0f} MB with "
            note += "mapped files"
            yield Row("memory", f"{job.name}: above plain", memory, "MB a rank", note)


def other_tools(options: Options) -> Iterator[Row]:
    """What captures less, on the same job: Megatron's savers, msprobe's dumps."""
    own = functools.partial(Row, "other-tools")
    if options.only in (name := "Megatron's savers"):
        with scratch() as home:
            saved = ["--save", str(home / "saved"), "--save-interval", "100000"]
            saved += ["--save-activations-interval", "2", "--save-wgrads-interval", "2"]
            turns = jobs.in_turns(BASE, "savers", options.pairs, home, *saved)
            size = _size(home / "saved") / (options.pairs + 2) / _MB
            note = f"activations of linear layers, main gradients: {size:.0f} MB an iteration"
            yield own(name, turns.ratio, "× plain", note)
    for task in ("statistics", "tensor"):
        if options.only not in (name := f"msprobe's dump, {task}"):
            continue
        try:
            python = probe.python()
            with scratch() as home:
                turns = jobs.in_turns(BASE, task, options.pairs, home, python=python)
                size = _size(home / "dump") / (options.pairs + 2) / _MB
            yield own(name, turns.ratio, "× plain", f"level L0, {size:.0f} MB an iteration")
        except BenchError as error:
            yield own(name, None, "× plain", _first(error))


def comparison(options: Options) -> Iterator[Row]:
    """The comparison of two tensors in memory, against a copy of one."""
    from megatron_ttrace.compare.measure import measure
    from megatron_ttrace.placement.boxes import Box

    torch.set_num_threads(1)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        reference = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(1)).to(dtype)
        target = torch.empty_like(reference)
        boxes = (Box(logical=(0, 0), extent=(_SIDE, _SIDE), local=(0, 0)),)
        for kind, candidate in (("equal", reference.clone()), ("different", reference * 1.01)):
            compared = functools.partial(measure, candidate, reference, boxes)
            assert compared().n == reference.numel()
            # One thread that waits for nothing: processor time is the time, without other work.
            spent = functools.partial(_time, clock=time.process_time)
            pairs = [
                (spent(compared), spent(functools.partial(target.copy_, reference)))
                for _ in range(max(2 * options.pairs, 10))
            ]
            ours, copied = (statistics.median(values) for values in zip(*pairs, strict=True))
            note = f"{reference.nbytes / ours / 1e9:.2f} GB/s of tensor, "
            note += f"the copy {reference.nbytes / copied / 1e9:.1f} GB/s"
            ratio = jobs.median_ratio(*zip(*pairs, strict=True))
            yield Row("comparison", f"{name}, {kind} values", ratio, "× a copy", note)


def whole_check(options: Options) -> Iterator[Row]:
    """A check from its first line to its exit, against its two bare runs one after the other."""
    own = functools.partial(Row, "whole-check")
    for job in (BASE, TP2):
        if options.only not in job.name:
            continue
        pairs, firsts = [], []
        for _ in range(options.pairs):
            with scratch() as home:
                bare = _bare(job, home) + _bare(dataclasses.replace(job, ranks=1, layout=()), home)
            with scratch() as home:
                seconds, first = _check(job, home)
            pairs.append((seconds, bare))
            firsts.append(first)
        ratio = statistics.median(a / b for a, b in pairs)
        checked, bare = (statistics.median(values) for values in zip(*pairs, strict=True))
        note = f"{checked:.1f} s against {bare:.1f} s; first line after "
        note += f"{statistics.median(firsts):.1f} s"
        yield own(f"{job.name}: no cached reference", ratio, "× bare runs", note)


def _bare(job: Job, home: Path) -> float:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks)]
    launcher += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    words = [*launcher, str(SCRIPT), *job.arguments, "--train-iters", "1"]
    return _time(lambda: jobs.run([sys.executable, *words], home))


def _check(job: Job, home: Path) -> tuple[float, float]:
    """Seconds of a whole check, and until it printed something."""
    run = ["check", "--nproc-per-node", str(job.ranks), "--ttrace-no-wandb"]
    words = [*run, "--", str(SCRIPT), *job.arguments, "--train-iters", "1"]
    command = [sys.executable, "-m", "megatron_ttrace", *words]
    first = 0.0
    began = time.perf_counter()
    with jobs.started(command, home) as process:
        if process.stdout.read(1):
            first = time.perf_counter() - began
        rest = process.stdout.read()
    if process.returncode:
        raise BenchError(f"the check ended with exit code {process.returncode}:\n{rest[-800:]}")
    return time.perf_counter() - began, first


def _time(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    work()
    return clock() - began


def _size(home: Path) -> int:
    """Bytes of all files in a directory, links followed at its top only."""
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file())


def _first(error: BenchError) -> str:
    return f"could not run: {str(error).splitlines()[-1][:160]}"


SECTIONS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "traced-step": traced_step,
    "comparison": comparison,
    "whole-check": whole_check,
    "other-tools": other_tools,
}
