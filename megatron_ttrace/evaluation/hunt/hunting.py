# SPDX-License-Identifier: Apache-2.0
"""Check combinations one after the other, and reduce each new divergence to what it needs."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

from megatron_ttrace.evaluation.hunt import reduction
from megatron_ttrace.evaluation.hunt.combinations import Combination, Covering, Space
from megatron_ttrace.evaluation.hunt.reduction import Reduced
from megatron_ttrace.evaluation.recipes.collect import Answer, SmallJob
from megatron_ttrace.evaluation.recipes.run import Checker, JobRow, Results
from megatron_ttrace.jobs import known_faults, validity
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.known_faults import Finding
from megatron_ttrace.jobs.shrink import plan
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.mcore.versions import megatron_core_version
from megatron_ttrace.saved.bisection import smallest
from megatron_ttrace.trace.errors import TTraceError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A combination that was checked, and what came out."""

    combination: Combination
    row: JobRow


class Hunt:
    """Combinations around a command.

    Combinations that are known to diverge, by docs/findings.md or by an earlier one of this hunt,
    are not checked: they would hide what else diverges. Nor are those that have values with which
    an earlier one failed.
    """

    def __init__(
        self,
        space: Space,
        check: Checker,
        results: Results,
        most: int,
        seed: int,
        fails: Sequence[Finding],
    ) -> None:
        """``most``: ranks of a job; ``fails``: what is known to end with an error."""
        self._space, self._check, self._most = space, check, most
        self._results, self._fails = results, fails
        self._version = megatron_core_version()
        self._jobs: dict[tuple[tuple[str, str], ...], plan.Job | None] = {}
        self._known: set[plan.Job] = set()
        self.covering = Covering(space, self._is_new, seed)
        self.failures: list[Reduced] = []
        self._failing: list[frozenset[tuple[str, str]]] = []

    def run(self, seconds: float) -> Iterator[Tried]:
        """Check combinations until the time is over; what was checked before is read.

        Each is yielded as soon as it is written. Raises ``TTraceError`` when Megatron does not
        accept the job around which all others are.
        """
        end = time.monotonic() + seconds
        for combination in self.covering:
            if time.monotonic() > end:
                return
            if (job := self._job(combination)) is None:
                raise TTraceError(
                    "Megatron does not accept the shrunk command with a small number of layers, so "
                    "nothing can be tried around it"
                )
            command = self._space.command(combination)
            row = self._row(SmallJob.of(command, job), combination)
            if row.answer in (Answer.EQUIVALENT, Answer.DIVERGED):
                self.covering.ran(combination)
            if row.together:
                self._failing.append(frozenset(row.together))
            if row.answer is Answer.DIVERGED and not row.finding:
                self._reduce(command, job, row)
            yield Tried(combination=combination, row=row)

    def given(self, command: Command, jobs: Sequence[plan.Job]) -> JobRow:
        """Check the small jobs of a command, until one does not come out equivalent."""
        for job in jobs:
            row = self._row(SmallJob.of(command, job))
            if row.answer is Answer.DIVERGED:
                self._reduce(command, job, row)
            if row.answer is not Answer.EQUIVALENT:
                break
        return row

    def _reduce(self, command: Command, job: plan.Job, row: JobRow) -> None:
        self.failures.append(reduction.reduce(command, job, row, self._row, self._most))

    def _row(self, small: SmallJob, combination: Combination | None = None) -> JobRow:
        row = self._results.of(small)
        if row is not None:
            return row
        row = self._check(small)
        if combination and row.answer in (Answer.REFUSED, Answer.FAILS):
            row = dataclasses.replace(row, together=self._together(small, combination))
        return self._results.keep(small, row)

    def _together(self, small: SmallJob, combination: Combination) -> tuple[tuple[str, str], ...]:
        """The values of a combination that it fails by."""
        early = self._check.fails(small, early=True)

        def fails(some: Sequence[tuple[str, str]]) -> bool:
            values = dict(some)
            job = self._job(values) if self._space.has_effect(values) else None
            # One with a known fault would fail, or hang, for a reason of its own.
            if job is None or job in self._known:
                return False
            return self._check.fails(SmallJob.of(self._space.command(values), job), early=early)

        return tuple(smallest(tuple(combination.items()), fails))

    def _is_new(self, combination: Combination) -> bool:
        """Whether Megatron accepts it, and nothing is known of it."""
        if any(each <= combination.items() for each in self._failing):
            return False
        job = self._job(combination)
        if job is None or job in self._known:
            return False
        options = CommandFlags.parse(job.arguments).options()
        return not any(each.pattern().fits(options) for each in self.failures)

    def _job(self, combination: Combination) -> plan.Job | None:
        """The small job of a combination; ``None`` where there is none, or Megatron refuses it."""
        key = tuple(sorted(combination.items()))
        if key not in self._jobs:
            self._jobs[key] = self._planned(combination)
        return self._jobs[key]

    def _planned(self, combination: Combination) -> plan.Job | None:
        command = self._space.command(combination)
        try:
            (job,) = plan.as_it_is(command).jobs
        except TTraceError:
            return None
        ranks = job.axes.ranks
        if ranks > self._most:
            return None
        words = self._check.arguments(SmallJob.of(command, job))
        options = validity.options(words, ranks)
        if options is None or any(each.fits(options) for each in self._fails):
            return None
        if known_faults.finding_of(options, self._version):
            self._known.add(job)
        return job
