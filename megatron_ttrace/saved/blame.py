# SPDX-License-Identifier: Apache-2.0
"""Which of the user's changes make a job diverge: proven by checks with some of them left out."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from megatron_ttrace.jobs import hunks, provenance
from megatron_ttrace.jobs.hunks import Splice
from megatron_ttrace.jobs.overlay import Difference, Overlay, Tree
from megatron_ttrace.jobs.processes import apart, signals
from megatron_ttrace.jobs.settings import Settings, checking
from megatron_ttrace.saved import api
from megatron_ttrace.saved.bisection import causes, smallest
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.blamed import Blame, BlamedChange, BlamedHunk, Blaming
from megatron_ttrace.trace.collectives import pattern
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.executed import ChangedCode, Execution
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.records import Culprit, Result, Run
from megatron_ttrace.trace.sanitise import in_one_line

type Say = Callable[[str], None]

_TREES, _EDITS, _SEARCH = "trees", "edits.json", "search"
_SECONDS_TO_REMOVE = 20.0
"""At most: thousands of files."""
_LIKELY = (Execution.IN_CULPRIT, Execution.ELSEWHERE, Execution.NOT_KNOWN, Execution.NOT_RUN)
"""What to try first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a tree is checked.

    Attributes:
        settings: of the check; the report of the user's tree is written to their directory.
        environment: all of it, with which the script imports the user's tree.
    """

    interpreter: str
    arguments: tuple[str, ...]
    ranks: int
    settings: Settings
    environment: Mapping[str, str]
    fork: bool = True

    @property
    def beside(self) -> Path:
        """Where copies are checked."""
        return Path(f"{self.settings.directory}-blame")


@dataclasses.dataclass(frozen=True, slots=True)
class _Checked:
    """The answer for some hunks on the good tree.

    Attributes:
        names: of the culprits, layers' numbers as ``*``; one is empty if nothing is known.
        why: it could not be checked.
    """

    result: Result
    names: frozenset[str] = frozenset()
    why: str = ""


def blame(tree: Tree, difference: Difference, trial: Trial, say: Say) -> api.Report:
    """Check the user's tree and, if it diverges, find the hunks of the difference to blame.

    Returns:
        The report of the user's tree, on disk too; with ``summary.blame`` if it diverged.

    Raises:
        TTraceError: when the user's tree cannot be checked, or does not differ.
    """
    if not difference.good and not difference.bad:
        raise TTraceError(f"{tree.packages} has the same Python files as {difference.since}")
    owned.require(trial.beside, (_TREES, _EDITS))
    owned.make(trial.beside, ignored=True)
    if trial.fork:
        apart.import_torch(tree.script, trial.settings.device)
    try:
        return _Search(tree, difference, trial, say).run()
    finally:
        _remove_copies(trial)


def run_apart(
    trial: Trial, script: Path, good: str | None, say: Say, *, quiet: bool
) -> Blame | None:
    """Run ``ttrace blame`` in a process of its own, for a job that was checked and diverges.

    Its directories are in :attr:`Trial.beside`: the report of the first check on disk only gains
    the answer, whatever the search makes of the job. ``good`` is the value of ``--good``.

    Returns:
        The answer; ``None`` when there is none, and ``say`` was told why.
    """
    try:
        return _run_apart(trial, script, good, quiet=quiet)
    except TTraceError as error:
        say(f"no change can be blamed: {in_one_line(error)}")
        return None


def _run_apart(trial: Trial, script: Path, good: str | None, *, quiet: bool) -> Blame | None:
    report = api.load_report(trial.settings.directory)
    owned.make(trial.beside, ignored=True)
    options = [*(["--good", good] if good else []), *([] if trial.fork else ["--no-fork"])]
    ours = trial.settings.unlogged(trial.beside / _SEARCH)
    if report.summary.config.get("isolate"):  # maybe because rounding hid too much
        ours = dataclasses.replace(ours, isolate=True)
    words = checking(script, trial.arguments, trial.ranks, ours, *options, command="blame")
    try:
        code, errors = apart.ttrace(trial.interpreter, words, trial.environment, quiet=quiet)
    finally:
        # If this process is to end, that one is killed.
        _remove_copies(dataclasses.replace(trial, settings=ours))
    if code == ExitCode.EQUIVALENT:
        raise TTraceError(f"a copy of the same files is equivalent, see {ours.directory}")
    if code != ExitCode.DIVERGED:
        raise TTraceError(errors)
    verdict = api.load_report(ours.directory).summary.blame
    api.rewritten(report, dataclasses.replace(report.summary, blame=verdict))
    return verdict


def _remove_copies(trial: Trial) -> None:
    signals.take_time(_SECONDS_TO_REMOVE)
    owned.discard(trial.beside / _TREES)


def names_of(culprits: Iterable[Culprit]) -> frozenset[str]:
    """Where a job diverges: the names of its culprits, in any layer."""
    return frozenset(pattern(module_of(culprit.name)) for culprit in culprits) or frozenset({""})


type _Group = tuple[int, ...]
"""Numbers of hunks that stay together."""


class _TooManyError(Exception):
    """The search would take too many checks."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """How a search ended, as in :class:`Blame`; the changes as numbers of hunks."""

    result: Blaming
    sets: Sequence[frozenset[int]]
    reason: str


class _Search:
    """The checks of one search; each combination of hunks is checked once."""

    def __init__(self, tree: Tree, difference: Difference, trial: Trial, say: Say) -> None:
        self._tree, self._difference, self._trial, self._say = tree, difference, trial, say
        self._splices = hunks.difference(difference.good, difference.bad)
        self._overlay = Overlay(tree, trial.beside / _TREES, difference)
        self._known: dict[frozenset[int], _Checked] = {}
        self._checks = 0
        self._wanted: frozenset[str] = frozenset()
        self._usual: frozenset[str] = frozenset()

    def run(self) -> api.Report:
        """See :func:`blame`."""
        began = time.monotonic()
        everything = frozenset(range(len(self._splices)))
        home = self._trial.settings.directory
        checked = self._check(everything, home, self._difference.since)
        if checked.result is Result.COULD_NOT_CHECK:
            raise TTraceError(checked.why)
        report = api.load_report(home)
        summary = dataclasses.replace(report.summary, run=self._of_user(report.run))
        if checked.result is Result.DIVERGED:
            blamed = self._blamed(everything, checked, summary.changed_code)
            blamed = dataclasses.replace(
                blamed,
                since=self._difference.since,
                hunks=len(everything),
                checks=self._checks,
                seconds=time.monotonic() - began,
            )
            summary = dataclasses.replace(summary, blame=blamed)
        return api.rewritten(report, summary)

    def _of_user(self, run: Run | None) -> Run | None:
        """A run of the user's tree, of which a copy was checked."""
        tree = self._tree
        if run is None:
            return None
        commit, dirty = provenance.commit_of(tree.packages / "core" / "__init__.py")
        megatron = dataclasses.replace(
            run.megatron, path=str(tree.packages), commit=commit, dirty=dirty
        )
        return dataclasses.replace(run, script=str(tree.script), megatron=megatron)

    def _blamed(
        self, everything: frozenset[int], checked: _Checked, changed: ChangedCode | None
    ) -> Blame:
        good = self._ask(frozenset())
        self._usual = good.names if good.result is Result.DIVERGED else frozenset()
        self._wanted = checked.names - self._usual
        if not self._wanted:
            return Blame(Blaming.GOOD_DIVERGES, "")
        ran = where_ran(self._splices, changed)
        self._say(f"grouping {len(self._splices)} hunks by the names that they share")
        groups = hunks.groups(self._splices, self._difference.good, self._difference.bad)
        likely = {group: min(_LIKELY.index(ran[number]) for number in group) for group in groups}
        ordered = sorted(groups, key=likely.__getitem__)
        pivots = [
            last - 1
            for last in itertools.accumulate(
                sum(likely[group] in tier for group in groups) for tier in ((0,), (1, 2))
            )
            if 0 < last < len(groups)
        ]
        if good.result is Result.COULD_NOT_CHECK:
            outcome = self._in_the_users_tree(ordered, pivots, good.why)
        else:
            outcome = self._on_the_good_tree(ordered, pivots)
        is_removed = outcome.result is Blaming.REMOVED
        changes = tuple(
            self._change(numbers, ran, self._wanted if is_removed else self._ask(numbers).names)
            for numbers in outcome.sets
        )
        idle = ran.count(Execution.NOT_RUN)
        return Blame(outcome.result, "", changes=changes, idle=idle, reason=outcome.reason)

    def _on_the_good_tree(self, groups: Sequence[_Group], pivots: Sequence[int]) -> _Outcome:
        """Changes that make the good tree diverge."""
        everything = _numbers(groups)
        proof = causes(groups, lambda some: self._answer(_numbers(some)), pivots)
        sets = [
            fewer for cause in proof.sets for fewer in self._refined(_numbers(cause), everything)
        ]
        without = self._ask(everything.difference(*sets))
        if proof.without is Result.EQUIVALENT:
            return _Outcome(Blaming.PROVEN, sets, _listed(without.names))
        if without.result is Result.DIVERGED:
            return _Outcome(Blaming.OTHERS, sets, _listed(without.names - self._usual))
        return _Outcome(Blaming.ALONE, sets, without.why)

    def _in_the_users_tree(
        self, groups: Sequence[_Group], pivots: Sequence[int], why: str
    ) -> _Outcome:
        """The same, where the good tree cannot run the job: an option is new, for instance.

        The smallest set with which it runs and diverges has what the job needs, and what is wrong.
        If it is equivalent without some of them, only these are to blame.
        """
        everything = _numbers(groups)
        limit = self._checks + 4 * len(groups).bit_length() + 12

        def answer(some: Sequence[_Group]) -> Result:
            if self._checks > limit:
                raise _TooManyError
            is_bad = self._answer(_numbers(some)) is Result.DIVERGED
            return Result.DIVERGED if is_bad else Result.EQUIVALENT

        try:
            needed = causes(groups, answer, pivots).sets
        except _TooManyError:
            return _Outcome(Blaming.GOOD_UNCHECKED, [], why)
        sets = [_numbers(cause) for cause in needed]
        for group in needed[0] if len(needed) == 1 else ():
            if self._is_good(everything.difference(group)):
                fewer = smallest(group, lambda some: self._is_good(everything.difference(some)))
                return _Outcome(Blaming.REMOVED, [frozenset(fewer)], why)
        remaining = self._ask(everything.difference(*sets))
        if remaining.result is Result.COULD_NOT_CHECK:
            return _Outcome(Blaming.ALONE, sets, remaining.why)
        if remaining.result is Result.DIVERGED:
            return _Outcome(Blaming.OTHERS, sets, _listed(remaining.names))
        return _Outcome(Blaming.REMOVED, sets, why)

    def _is_good(self, numbers: frozenset[int]) -> bool:
        return self._answer(numbers) is Result.EQUIVALENT

    def _refined(self, group: frozenset[int], everything: frozenset[int]) -> list[frozenset[int]]:
        """Sets of fewer hunks of a group, if each is to blame, and it is equivalent without all."""
        if len(group) == 1 or not self._is_good(everything - group):
            return [group]
        proof = causes(sorted(group), lambda some: self._answer(frozenset(some)))
        sets = [frozenset(cause) for cause in proof.sets]
        is_proven = sets and self._is_good(everything.difference(*sets))
        return sets if is_proven else [group]

    def _change(
        self, numbers: frozenset[int], ran: Sequence[Execution], names: Iterable[str]
    ) -> BlamedChange:
        changed = [
            BlamedHunk(
                file=splice.file,
                line=splice.line,
                function=splice.function,
                removed=splice.removed,
                added=splice.added,
                ran=ran[number],
            )
            for number in sorted(numbers)
            for splice in (self._splices[number],)
        ]
        return BlamedChange(tuple(changed), tuple(sorted(filter(None, names))))

    def _answer(self, numbers: frozenset[int]) -> Result:
        """Whether the job diverges with these hunks as it does with all of them."""
        checked = self._ask(numbers)
        if checked.result is Result.COULD_NOT_CHECK:
            return Result.COULD_NOT_CHECK
        if checked.names & self._wanted:
            return Result.DIVERGED
        # Diverging elsewhere is no answer: it may hide whether it diverges here.
        return Result.EQUIVALENT if checked.names <= self._usual else Result.COULD_NOT_CHECK

    def _ask(self, numbers: frozenset[int]) -> _Checked:
        if numbers not in self._known:
            good, bad = self._difference.good, self._difference.bad
            texts = hunks.applied(good, (self._splices[number] for number in numbers))
            if why := hunks.broken(texts, good, bad):
                self._known[numbers] = _Checked(Result.COULD_NOT_CHECK, why=why)
            else:
                self._check(numbers, self._trial.beside / "checks" / str(self._checks + 1))
        return self._known[numbers]

    def _check(self, numbers: frozenset[int], folder: Path, since: str = "") -> _Checked:
        """Check a combination; ``since`` names the good tree, to record where changed code runs."""
        self._checks += 1
        trial, overlay = self._trial, self._overlay
        overlay.show(self._splices[number] for number in sorted(numbers))
        script, environment = overlay.placed(trial.environment)
        command = checking(self._tree.script, trial.arguments, trial.ranks, trial.settings)
        environment[provenance.COMMAND] = provenance.command_line(["ttrace", *command])
        if since:
            edits = self._difference.edits()
            environment |= overlay.announced(edits, trial.beside / _EDITS)
        else:
            # Other code needs another reference, which nobody else will use.
            environment["TTRACE_CACHE"] = ""
        if environment.pop("PYTHONDONTWRITEBYTECODE", ""):
            # Nothing is compiled again and again; it is kept among our files.
            environment["PYTHONPYCACHEPREFIX"] = str((trial.beside / _TREES / "compiled").resolve())
        settings = trial.settings.unlogged(folder)
        options = ["--once"] if trial.fork else ["--once", "--no-fork"]
        code, errors = apart.ttrace(
            trial.interpreter,
            checking(script, trial.arguments, trial.ranks, settings, *options),
            environment,
            quiet=True,
            warm=trial.fork,
        )
        if code in (ExitCode.EQUIVALENT, ExitCode.DIVERGED):
            report = api.load_report(folder)
            names = names_of(report.culprits) if code else frozenset[str]()
            checked = _Checked(report.verdict, names)
        elif code == ExitCode.COULD_NOT_CHECK:
            checked = _Checked(Result.COULD_NOT_CHECK, why=in_one_line(errors))
        else:
            raise TTraceError(f"a check ended with exit code {code}: {errors}")
        if not since:
            owned.discard(folder / "reference")
        count = f"{len(numbers)} of {len(self._splices)}"
        self._say(f"check {self._checks}: {count} hunks: {checked.result}")
        self._known[numbers] = checked
        return checked


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(filter(None, names)))


def _numbers(groups: Iterable[_Group]) -> frozenset[int]:
    return frozenset(itertools.chain.from_iterable(groups))


def where_ran(splices: Sequence[Splice], changed: ChangedCode | None) -> list[Execution]:
    """Where each hunk ran, by its function: in a culprit, elsewhere, or not at all."""
    by_function: dict[tuple[str, str], Execution] = {}
    by_file: dict[str, Execution] = {}
    for function in changed.functions if changed else ():
        by_function[function.file, function.function] = function.ran
        known = by_file.get(function.file, Execution.NOT_RUN)
        by_file[function.file] = min(known, function.ran, key=_LIKELY.index)
    executions = []
    for splice in splices:
        if changed is None:
            executions.append(Execution.NOT_KNOWN)
        elif not splice.is_code:
            executions.append(Execution.NOT_RUN)
        elif splice.is_whole:
            executions.append(by_file.get(splice.file, Execution.NOT_KNOWN))
        else:
            # A function of the good tree alone is not known to have run.
            is_gone = not splice.added and (splice.file, splice.function) not in by_function
            idle = Execution.NOT_KNOWN if is_gone else Execution.NOT_RUN
            executions.append(by_function.get((splice.file, splice.function), idle))
    return executions
