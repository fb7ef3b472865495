# SPDX-License-Identifier: Apache-2.0
"""The smallest layout, and the fewest flags, with which a job still diverges in the same module."""

import dataclasses
from collections.abc import Callable, Sequence

from megatron_ttrace.evaluation.recipes.collect import Answer, SmallJob
from megatron_ttrace.evaluation.recipes.run import JobRow
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.known_faults import Finding
from megatron_ttrace.jobs.shrink import axes, plan
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags, Flag
from megatron_ttrace.jobs.shrink.plan import Job
from megatron_ttrace.mcore.options.roles import ROLES, Role
from megatron_ttrace.saved.bisection import smallest
from megatron_ttrace.trace.errors import TTraceError

type Check = Callable[[SmallJob], JobRow]

_FEATURES = (Role.CODE, Role.DATA, Role.LAYOUT, Role.TRANSPORT)
"""What flags may be about that can be left out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A diverging job of which nothing more can be left out.

    Attributes:
        first: the key of the job that showed the divergence.
        axes: the sizes that it needs, by their short names.
        flags: that it needs, besides sizes.
        left_out: flags that it does not need.
        row: of the check of the smallest job.
        healthy: the command of a job that differs least and is equivalent; may be empty.
        checked: how many jobs.
    """

    first: str
    axes: dict[str, int]
    flags: tuple[str, ...]
    left_out: tuple[str, ...]
    row: JobRow
    healthy: str
    checked: int

    def pattern(self) -> Finding:
        """What other jobs combine that show the same."""
        return Finding(self.row.why, CommandFlags.parse(self.needs().split()).options())

    def needs(self) -> str:
        """Axes and flags in words."""
        sizes = (f"{axes.FLAGS[name]} {size}+" for name, size in self.axes.items() if name != "dp")
        return " ".join((*sizes, *self.flags))


def reduce(command: Command, job: Job, row: JobRow, check: Check, most: int) -> Reduced:
    """Leave out parallel axes, then flags, as long as a culprit of the job stays.

    ``job``, a small one of ``command``, diverges in its check (``row``); ``most``: ranks of a job.
    """
    search = _Search(command, row, check)
    spread = job.axes.spread()
    layouts = {spread: job}

    def laid_out(kept: Sequence[str]) -> bool:
        try:
            layouts[tuple(kept)] = plan.with_axes(command, tuple(kept), most)
        except TTraceError:
            return False
        return search.diverges(layouts[tuple(kept)])

    kept = tuple(smallest(spread, laid_out))
    job = layouts[kept]
    given = CommandFlags.parse(job.arguments).flags
    features = [flag for flag in given if _is_feature(flag)]

    def with_flags(some: Sequence[Flag]) -> Job:
        words = [w for f in given if f in some or f not in features for w in f.words()]
        return dataclasses.replace(job, arguments=tuple(words))

    least = smallest(features, lambda some: search.diverges(with_flags(some)))
    job = with_flags(least)
    return Reduced(
        first=row.key,
        axes={name: getattr(job.axes, name) for name in kept},
        flags=tuple(str(flag) for flag in least),
        left_out=tuple(str(flag) for flag in features if flag not in least),
        row=search.rows.get(job, row),
        healthy=search.nearest(job),
        checked=len(search.rows),
    )


def _is_feature(flag: Flag) -> bool:
    return ROLES.get(flag.option or "") in _FEATURES


class _Search:
    """Checks of smaller jobs; one counts if it diverges in a module of the first."""

    def __init__(self, command: Command, first: JobRow, check: Check) -> None:
        self._command, self._check = command, check
        self._first = first
        self.rows: dict[Job, JobRow] = {}

    def diverges(self, job: Job) -> bool:
        """Whether it still does. One that cannot be checked does not."""
        if job not in self.rows:
            self.rows[job] = self._check(SmallJob.of(self._command, job))
        row = self.rows[job]
        # Without some options it may show a known fault instead, in the same module.
        same = row.answer is Answer.DIVERGED and row.finding == self._first.finding
        return same and not set(self._first.modules).isdisjoint(row.modules)

    def nearest(self, job: Job) -> str:
        """The command of the equivalent job that differs from ``job`` by the fewest words."""
        words = set(job.arguments)
        healthy = [
            (len(words ^ set(other.arguments)), row.command)
            for other, row in self.rows.items()
            if row.answer is Answer.EQUIVALENT
        ]
        return min(healthy, default=(0, ""))[1]
