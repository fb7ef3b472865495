# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay huggingface``: Megatron's models against those of ``transformers``."""

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags
from megatron_ttrace.trace import budget
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from tests.assay import harness
from tests.assay.harness import FALSE_ALARM, Row
from tests.saved.huggingface.jobs import CP, EP, FAULTS, PP, TP, TWINS, arguments

_EPILOG = """\
examples:
  python -m tests.assay huggingface healthy --seed 1 --seed 2 --seed 3
  python -m tests.assay huggingface faults --only 'rotary*'

exit code: 0 all answers are right; 1 a healthy job diverges; 2 else
"""
_LENGTHS = (32, 64, 160)


@dataclasses.dataclass(frozen=True)
class _Job:
    """``culprit``: pattern of the first; empty if it must be refused, ``None`` if it is healthy."""

    id: str
    twin: str
    words: tuple[str, ...]
    culprit: str | None = None


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``huggingface`` command."""
    summary = "healthy and wrong models of Megatron's against transformers'"
    parser = command.add(subparsers, "huggingface", _run, summary=summary, epilog=_EPILOG)
    actions = parser.add_subparsers(required=True, metavar="healthy|faults")
    for name, jobs in (("healthy", _healthy), ("faults", _faults)):
        action = harness.add(
            *(actions, name, _run),
            summary=f"{name} jobs",
            epilog=_EPILOG,
            directory="ttrace-out/huggingface",
        )
        action.set_defaults(jobs=jobs)
        action.add_argument("--seed", type=flags.integer(1, 1 << 30), action="append", metavar="N")
        action.add_argument("--by-layer", action="store_true", help="as if memory were short")
        action.add_argument("--record", action="store_true", help=argparse.SUPPRESS)


def _run(args: argparse.Namespace) -> int:
    """Trace all jobs in one process, which emulates a GPU; compare them in this one."""
    jobs = {job.id: job for seed in args.seed or [1] for job in args.jobs(seed)}
    chosen = [jobs[name] for name in harness.chosen(jobs, args.only)]
    if args.record:
        return _record(chosen, args.directory)
    subprocess.run([sys.executable, "-m", "tests.assay", *sys.argv[1:], "--record"], check=True)
    if args.by_layer:
        budget.host_room = lambda ranks: 0
    rows = harness.execute(chosen, functools.partial(_attempt, args.directory), args)
    return harness.finish(rows, {"right": 1.0})


def _healthy(seed: int) -> Iterator[_Job]:
    for name, twin in TWINS.items():
        layouts = [TP, PP, CP]
        if "local" in twin.flags:  # no context parallelism; RMSNorm not with sequences'
            layouts = [TP[:2], PP, ()]
        if "--num-experts" in twin.flags:  # there TP needs sequence parallelism
            layouts = [EP, *(layout for layout in layouts if layout != TP[:2])]
        for layout in layouts:
            length = _LENGTHS[seed % len(_LENGTHS)]
            words = arguments(twin, (*layout, "--seed", str(seed)), length=length)
            short = layout[0].removeprefix("--").split("-")[0] if layout else "single"
            yield _Job(f"{name}-{short}-{seed}", name, words)


def _faults(seed: int) -> Iterator[_Job]:
    for name, fault in FAULTS.items():
        words = arguments(TWINS[fault.twin], (*fault.flags, "--seed", str(seed)))
        yield _Job(f"{name}-{seed}", fault.twin, words, fault.culprit)


def _record(jobs: list[_Job], directory: Path) -> int:
    from megatron_ttrace.jobs.resources import launch_dir
    from megatron_ttrace.saved.runner import Case, Runner

    runner = Runner(directory)
    for job in jobs:
        if (directory / job.id / "summary.json").exists():
            continue
        pairs = itertools.pairwise(job.words)
        nproc = 2 if any(f.endswith("parallel-size") and size == "2" for f, size in pairs) else 1
        script = launch_dir() / TWINS[job.twin].script
        try:
            runner.run(Case(name=job.id, arguments=job.words, nproc=nproc, script=script))
        except TTraceError as error:
            print(f"{job.id}: no trace: {error}")
    return ExitCode.EQUIVALENT


def _attempt(directory: Path, job: _Job) -> Row:
    from megatron_ttrace.saved import api
    from megatron_ttrace.saved.huggingface import comparison, process

    comparison._run = process.write  # imports transformers once
    home = directory / job.id
    config = TWINS[job.twin].write(home / "model")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            report = api.diff(f"hf:{config}", home, output=home / "huggingface")
    except TTraceError as error:
        return Row(job.id, job.twin, {"right": job.culprit == ""}, f"refused: {error}")
    margins = [v.margin for v in report.verdicts if v.margin is not None and not v.is_luck]
    names = [culprit.name for culprit in report.culprits]
    passed = report.summary.counts.get("pass", 0)
    note = f"{report.verdict} {passed} pass, margin {max(margins):.3g} {names[:2]}"
    if job.culprit is None:
        alarm = {} if report.is_equivalent else {FALSE_ALARM: True}
        return Row(job.id, job.twin, {"right": report.is_equivalent, **alarm}, note)
    right = bool(names) and bool(job.culprit) and bool(re.fullmatch(job.culprit, names[0]))
    return Row(job.id, job.twin, {"right": right}, note)
