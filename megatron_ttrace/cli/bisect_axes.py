# SPDX-License-Identifier: Apache-2.0
"""``ttrace bisect --axes``: the smallest layout and set of features that still diverges."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.cli import command, training
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.settings import split
from megatron_ttrace.jobs.shrink import documents, plan
from megatron_ttrace.jobs.shrink.given import Flag, Given
from megatron_ttrace.jobs.shrink.plan import Job
from megatron_ttrace.mcore.options.decisions import decision
from megatron_ttrace.mcore.options.roles import Role
from megatron_ttrace.saved import api
from megatron_ttrace.saved.bisection import smallest
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.records import Result
from megatron_ttrace.trace.sanitise import in_one_line

_FEATURES = (Role.CODE, Role.DATA, Role.LAYOUT, Role.TRANSPORT)
"""What flags may be about that can be left out."""


def run(args: argparse.Namespace) -> int:
    """Shrink the command, leave out axes, then flags, while the same module diverges."""
    found = training.command_of(args)
    say = command.silent if args.quiet or args.json else command.progress()
    search = _Search(found, args.directory, say)
    whole = plan.shrink(search.command, args.max_ranks)
    job = search.begin(whole.jobs)
    spread = job.axes.spread()
    layouts = {spread: job}

    def laid_out(kept: Sequence[str]) -> bool:
        try:
            layouts[tuple(kept)] = plan.with_axes(search.command, tuple(kept), args.max_ranks)
        except TTraceError:
            return False
        return search.diverges(layouts[tuple(kept)], f"axes: {', '.join(kept) or 'none'}")

    axes = tuple(smallest(spread, laid_out))
    job = layouts[axes]
    given = Given.parse(job.arguments).flags
    features = [flag for flag in given if _is_feature(flag)]

    def with_flags(kept: Sequence[Flag]) -> Job:
        words = [w for f in given if f in kept or f not in features for w in f.words()]
        return dataclasses.replace(job, arguments=tuple(words))

    least = smallest(
        features, lambda kept: search.diverges(with_flags(kept), f"{len(kept)} other flags")
    )
    job = with_flags(least)
    (small,) = training.small(search.command, [job], search.prefix)
    words = shlex.join(training.checking(small, job.axes.ranks))
    answer: dict[str, Any] = {
        "axes": {name: getattr(job.axes, name) for name in axes},
        "ranks": job.axes.ranks,
        "flags": [str(flag) for flag in least],
        "left out": [str(flag) for flag in features if flag not in least],
        "culprits": sorted(search.modules),
        "checked": search.checked,
        "command": words,
    }
    if args.json:
        print(json.dumps(answer, indent=1))
        return ExitCode.EQUIVALENT
    sizes = ", ".join(f"{name} {size}" for name, size in answer["axes"].items()) or "no axis"
    print(f"ttrace: the smallest job that diverges has {sizes} ({search.checked} checks)")
    print(f"culprit    {', '.join(answer['culprits'])}")
    print(f"needs      {', '.join(answer['flags']) or 'no other flag'}")
    print(f"command    {words}")
    return ExitCode.EQUIVALENT


def _is_feature(flag: Flag) -> bool:
    found = decision(flag.option) if flag.option else None
    return found is not None and found.role in _FEATURES


class _Search:
    """Checks of small jobs of a command; one diverges if it does so in a module of the first's."""

    def __init__(self, found: Command, directory: Path, say: command.Say) -> None:
        settings, theirs = split(found.arguments)
        self._settings = dataclasses.replace(settings, wandb=False, wandb_online=False)
        self.command = dataclasses.replace(found, arguments=tuple(theirs))
        self.modules: set[str] = set()
        self.checked = 0
        self.prefix = directory / training.DATA
        self._directory = directory
        self._say = say
        os.environ.setdefault("TTRACE_CACHE", str((directory / "references").resolve()))

    def begin(self, candidates: Sequence[Job]) -> Job:
        """The first of the small jobs that diverges.

        Raises:
            TTraceError: when none does, or the first cannot be checked.
        """
        from megatron_ttrace.jobs import job as processes

        script = Path(self.command.script)
        if not script.is_file():
            raise TTraceError(f"{script}: no such script")
        # Before the data is written: that imports Megatron, which must be the script's own.
        processes.prepare(self._settings.device, script, arguments=self.command.arguments)
        documents.write(self.prefix, candidates[0].arguments)
        for number, job in enumerate(candidates, 1):
            report = self._check(job, f"job {number} of {len(candidates)}, shrunk")
            if report.verdict is Result.DIVERGED:
                self.modules = _modules(report)
                return job
        raise TTraceError(
            "the command, shrunk, does not diverge, so there is nothing to find: see ttrace shrink "
            "for what is not kept"
        )

    def diverges(self, job: Job, what: str) -> bool:
        """Whether a smaller job still does. One that cannot be checked does not."""
        try:
            report = self._check(job, what)
        except TTraceError as error:
            self._say(f"could not be checked: {in_one_line(error)}")
            return False
        return report.verdict is Result.DIVERGED and not self.modules.isdisjoint(_modules(report))

    def _check(self, job: Job, what: str) -> api.Report:
        self.checked += 1
        self._say(f"check {self.checked}: {what}, {job.axes.ranks} ranks")
        directory = self._directory / "checks" / str(self.checked)
        data = documents.arguments(self.command.script, self.prefix, job.arguments)
        report = training.check(
            dataclasses.replace(self.command, arguments=(*job.arguments, *data)),
            dataclasses.replace(self._settings, directory=directory),
            command.silent,
            nproc=job.axes.ranks,
            settle=False,
        )
        self._say(report.verdict.value)
        return report


def _modules(report: api.Report) -> set[str]:
    """The culprits' names without the numbers of layers."""
    return {re.sub(r"\.\d+", "", one.name) for one in report.culprits}
