# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay huggingface``: Megatron's models against those of ``transformers``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags
from megatron_ttrace.trace import budget
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from tests.saved.huggingface.jobs import CP, EP, FAULTS, PP, TP, TWINS, arguments

_EPILOG = """\
examples:
  python -m tests.assay huggingface healthy --seed 1 --seed 2 --seed 3
  python -m tests.assay huggingface faults --only 'rotary*'

exit code: 0 all answers are right, 1 not
"""
_LENGTHS = (32, 64, 160)


@dataclasses.dataclass(frozen=True)
class _Job:
    name: str
    twin: str
    flags: tuple[str, ...]
    culprit: str | None = None


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``huggingface`` command."""
    parser = command.add(
        subparsers,
        "huggingface",
        run,
        summary="healthy and wrong models of Megatron's against transformers'",
        epilog=_EPILOG,
    )
    parser.add_argument("what", choices=("healthy", "faults"))
    parser.add_argument("--seed", type=flags.integer(1, 1 << 30), action="append", metavar="N")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names of jobs")
    parser.add_argument("--by-layer", action="store_true", help="as if memory were short")
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    command.add_directory(parser, "ttrace-huggingface")


def run(args: argparse.Namespace) -> int:
    """Trace all jobs in one process, which emulates a GPU; compare them in this one."""
    jobs = [
        job
        for job in (_healthy if args.what == "healthy" else _faults)(args.seed or [1])
        if any(fnmatch(job.name, pattern) for pattern in args.only or ["*"])
    ]
    if args.record:
        return _record(jobs, args.directory)
    subprocess.run([sys.executable, "-m", "tests.assay", *sys.argv[1:], "--record"], check=True)
    if args.by_layer:
        budget.host_room = lambda ranks: 0
    wrong = sum([not _is_right(job, args.directory) for job in jobs])
    print(f"{len(jobs) - wrong} of {len(jobs)} answers are right")
    return ExitCode.DIVERGED if wrong else ExitCode.EQUIVALENT


def _healthy(seeds: list[int]) -> Iterator[_Job]:
    for seed in seeds:
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


def _faults(seeds: list[int]) -> Iterator[_Job]:
    for seed in seeds:
        for name, fault in FAULTS.items():
            words = arguments(TWINS[fault.twin], (*fault.flags, "--seed", str(seed)))
            yield _Job(f"{name}-{seed}", fault.twin, words, fault.culprit)


def _record(jobs: list[_Job], directory: Path) -> int:
    from megatron_ttrace.jobs.resources import launch_dir
    from megatron_ttrace.saved.runner import Case, Runner

    runner = Runner(directory)
    for job in jobs:
        if (directory / job.name / "summary.json").exists():
            continue
        parallel = [
            job.flags[i + 1] for i, f in enumerate(job.flags) if f.endswith("parallel-size")
        ]
        nproc = 2 if "2" in parallel else 1
        try:
            script = launch_dir() / TWINS[job.twin].script
            runner.run(Case(name=job.name, arguments=job.flags, nproc=nproc, script=script))
        except TTraceError as error:
            print(f"{job.name}: no trace: {error}")
    return ExitCode.EQUIVALENT


def _is_right(job: _Job, directory: Path) -> bool:
    from megatron_ttrace.saved import api
    from megatron_ttrace.saved.huggingface import comparison, process

    comparison._run = process.write  # imports transformers once
    home = directory / job.name
    config = TWINS[job.twin].write(home / "model")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            report = api.diff(f"hf:{config}", home, output=home / "huggingface")
    except TTraceError as error:
        print(f"{job.name}: refused: {error}")
        return job.culprit == ""
    margins = [v.margin for v in report.verdicts if v.margin is not None and not v.is_luck]
    names = [culprit.name for culprit in report.culprits]
    passed = report.summary.counts.get("pass", 0)
    print(f"{job.name}: {report.verdict} {passed} pass, margin {max(margins):.3g} {names[:2]}")
    if job.culprit is None:
        return report.is_equivalent
    return bool(names) and bool(job.culprit) and bool(re.fullmatch(job.culprit, names[0]))
