# SPDX-License-Identifier: Apache-2.0
"""A pull request: the recipes that its changes can reach, checked with it and without it."""

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_ttrace.evaluation.recipes import collect, reached
from megatron_ttrace.evaluation.recipes.collect import Answer, Recipe, SmallJob
from megatron_ttrace.evaluation.recipes.reached import Files, Records
from megatron_ttrace.jobs.processes import apart, stripped
from megatron_ttrace.jobs.processes.worktrees import Checkout, Hunk
from megatron_ttrace.jobs.settings import Settings, checking
from megatron_ttrace.jobs.shrink import documents
from megatron_ttrace.report import blame as blaming
from megatron_ttrace.report import table, wording
from megatron_ttrace.report.review import Annotation, Level, Topic
from megatron_ttrace.saved import api, blame
from megatron_ttrace.trace import changes, owned
from megatron_ttrace.trace.blamed import Blame
from megatron_ttrace.trace.collectives import pattern
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.records import Culprit, Result
from megatron_ttrace.trace.sanitise import clean, in_one_line

type Say = Callable[[str], None]

_MOST = 10
"""Annotations of one kind that GitHub shows of a step."""
_RECORDS = "reached.json"
_RAN = "ran.jsonl"
NAMES = ("trees", _RECORDS, _RAN)
"""What is replaced in the working directory."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """A check of a job: its answer, its culprits or why there is no answer, and what ran."""

    answer: Result
    culprits: tuple[Culprit, ...] = ()
    why: str = ""
    folder: Path = Path()
    ran: Files | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A job to check, in the files of the pull request; ``name`` is its recipe's.

    ``is_dropped``: whether only the base has it: the pull request changes or removes its recipe.
    """

    name: str
    job: SmallJob
    is_dropped: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to check, by the job's key, and annotations of recipes that changed or cannot be read.

    ``has_lost``: whether a recipe of the base is gone, or can no longer be read.
    """

    tasks: dict[str, Task]
    annotations: tuple[Annotation, ...] = ()
    has_lost: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A commit, in a worktree; ``content`` is git's id of all its files."""

    commit: str
    root: Path
    content: str


class Pull:
    """A pull request: two commits, each checked in a worktree of its own."""

    def __init__(
        self,
        checkout: Checkout,
        inside: Path,
        directory: Path,
        head: str,
        base: str,
        quiet: bool,
        stack: ExitStack,
    ) -> None:
        """Make the worktrees; ``inside`` is where Megatron is in the repository."""
        self.inside, self.directory, self._quiet = inside, directory, quiet
        self.records: Records = Records.load(directory / _RECORDS)
        self.hunks: list[Hunk] = checkout.hunks(head, base, context=0)
        #: Files of the repository that the pull request changes or adds.
        self.changed_files = checkout.changed_files(head, base)
        self.used: set[str] = set()
        self._home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ttrace-")))
        owned.make(directory, ignored=True)

        def side(name: str, commit: str) -> Side:
            # Always the same places: they may be in arguments, and so in the names of jobs.
            tree = (directory / "trees" / name).resolve()
            root = stack.enter_context(checkout.at(commit, tree))
            return Side(commit, root, checkout.tree(commit))

        self.head, self.base = side("head", head), side("base", base)

    def check(self, job: SmallJob, side: Side) -> Checked:
        """Check a job in one of the commits."""
        checked = self._check(job, side)
        # What diverges with the pull request must be checked again. Else the same code has the
        # same answer.
        again = checked.answer is Result.DIVERGED and side is self.head
        if checked.answer is not Result.COULD_NOT_CHECK and not again:
            self.keep(job, side, checked.ran)
        return checked

    def ran(self, job: SmallJob) -> Files | None:
        """What a job ran when this commit or the base was checked; ``None`` if not known."""
        of_job = self.records.of_job
        known = (of_job(job.key, side.content, side.root) for side in (self.head, self.base))
        return next((ran for ran in known if ran is not None), None)

    def blamed(self, job: SmallJob, tell: Say) -> Blame | None:
        """The changes of the pull request that make a job diverge; ``None`` if not known."""
        trial, script = self._trial(job, self.head), self._script(job, self.head)
        return blame.run_apart(trial, script, self.base.commit, tell, quiet=self._quiet)

    def _script(self, job: SmallJob, side: Side) -> Path:
        return side.root / Path(job.script).relative_to(self.head.root)

    def _trial(self, job: SmallJob, side: Side) -> blame.Trial:
        """How a job is checked in the files of a commit."""
        folder = self.directory / "checks" / side.commit[:12] / job.key
        prefix = documents.write(self.directory / "data" / "text", (documents.SFT,))
        script = str(self._script(job, side))
        path = [str(side.root / self.inside), os.environ.get("PYTHONPATH", "")]
        return blame.Trial(
            interpreter=sys.executable,
            arguments=(*job.arguments, *documents.arguments(script, prefix, job.arguments)),
            ranks=job.ranks,
            settings=Settings(directory=folder, wandb=False),
            environment={
                **stripped.of(os.environ, self._home),
                **dict(job.environment),
                "TTRACE_CACHE": str(self._references),
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
            },
        )

    @property
    def _references(self) -> Path:
        return (self.directory / "references").resolve()

    def _check(self, job: SmallJob, side: Side) -> Checked:
        script = self._script(job, side)
        if not script.is_file():
            return Checked(Result.COULD_NOT_CHECK, why=f"{script.name}: no such script")
        log, references = self.directory / _RAN, self._references
        cached = set(os.listdir(references)) if references.is_dir() else set()
        trial = self._trial(job, side)
        folder = trial.settings.directory
        words = checking(script, trial.arguments, trial.ranks, trial.settings)
        code, errors = apart.ttrace(
            trial.interpreter,
            [str(log), str(side.root), *words],
            trial.environment,
            quiet=self._quiet,
            module=reached.MODULE,
        )
        if code == ExitCode.COULD_NOT_CHECK:
            return Checked(Result.COULD_NOT_CHECK, why=in_one_line(errors), folder=folder)
        if code not in (ExitCode.EQUIVALENT, ExitCode.DIVERGED):
            raise TTraceError(
                f"the check of {side.commit[:12]} ended with exit code {code}: {errors}"
            )
        report = api.load_report(folder)
        ran = reached.read_log(log, side.root, job.ranks)
        reference = (folder / "reference").resolve()
        self.used.add(reference.name)
        if ran is not None and reference.parent == references and reference.name in cached:
            # The reference was made by an earlier check: what it ran counts too.
            made = self.records.references.get(reference.name)
            ran = None if made is None else reached.merged(made, ran)
        elif ran is not None and reached.is_complete(ran):
            self.records.references[reference.name] = ran
        return Checked(report.verdict, report.culprits, folder=folder, ran=ran)

    def keep(self, job: SmallJob, side: Side, ran: Files | None) -> None:
        """Record what a job ran in a commit."""
        contents = [self.head.content, self.base.content]
        self.records.keep_job(job.key, side.content, ran, contents)
        self.records.save(self.directory / _RECORDS)

    def tidy(self) -> None:
        """Remove the references of other commits, which no check can use any more."""
        references = self._references
        for name in os.listdir(references) if references.is_dir() else ():
            if name not in self.used and (references / name / "meta.json").is_file():
                owned.discard(references / name)
        for name in self.records.references.keys() - self.used:
            del self.records.references[name]
        self.records.save(self.directory / _RECORDS)


def plan(pull: Pull, folder: Path, paths: Sequence[Path], max_ranks: int, tell: Say) -> Plan:
    """The different small jobs of the recipes at HEAD, and of those that the base had.

    What the base had is checked even if the pull request changes, breaks or removes its recipe:
    with it could go the only job that shows a fault. Raises ``TTraceError`` when there are no
    recipes at all.
    """
    places = [Path(os.path.relpath(folder / place, folder)) for place in paths]
    trees = [side.root / pull.inside for side in (pull.head, pull.base)]
    head, base = (_recipes(tree, places, max_ranks) for tree in trees)
    for path, place in zip(paths, places, strict=True):
        if not any(_is_inside(tree / place, tree) for tree in trees):
            raise TTraceError(f"{path} is not in HEAD: give a committed path below {folder}")
    if not head and not base and not paths:
        collect.collect(trees[0], (), max_ranks)  # raises: there are none
    tasks: dict[str, Task] = {}
    for recipe in head:
        for job in recipe.jobs:
            tasks.setdefault(job.key, Task(recipe.name, job))
    before = {recipe.name: recipe for recipe in base if recipe.is_trained}
    now = {recipe.name: recipe for recipe in head}
    annotations: list[Annotation] = []

    def annotate(level: Level, title: str, text: str, recipe: Recipe | None = None) -> None:
        annotation = Annotation(level, Topic.RECIPE, title, in_one_line(text))
        if recipe:
            file = (pull.inside / recipe.file).as_posix()
            annotation = dataclasses.replace(annotation, file=file, line=1)
        annotations.append(annotation)

    for recipe in head:
        if recipe.answer is Answer.COULD_NOT_CHECK and recipe.name not in before:
            tell(f"not checked: {recipe.name}: {recipe.why}")
    has_lost = False
    for name, recipe in before.items():
        jobs = [job.moved(pull.base.root, pull.head.root) for job in recipe.jobs]
        names = {tasks[job.key].name: None for job in jobs if job.key in tasks}
        dropped = [job for job in jobs if job.key not in tasks]
        for job in dropped:
            tasks[job.key] = Task(name, job, is_dropped=True)
        kept = now.get(name)
        if kept is not None and kept.is_trained:
            if dropped:
                count = "job" if len(dropped) == 1 else f"{len(dropped)} jobs"
                text = f"{name} makes other jobs than in the base; the {count} it made there: "
                annotate(Level.WARNING, "ttrace: recipe changed", f"{text}checked as well", kept)
        elif kept is not None:
            has_lost = True
            text = f"{name} can no longer be checked: {kept.why}"
            annotate(Level.ERROR, f"ttrace: recipe broken: {clean(name)}", text, kept)
        elif dropped:
            has_lost = True
            text = f"{name} is gone, and no other recipe makes the same jobs"
            annotate(Level.ERROR, f"ttrace: recipe removed: {clean(name)}", text)
        else:
            tell(f"renamed: {name} is now {', '.join(names)}")
    if not tasks:
        raise TTraceError(
            "no recipe can be checked: give model_config.yaml files or shell scripts that start a "
            "training with --recipes DIR or --recipe FILE"
        )
    return Plan(tasks, tuple(annotations), has_lost)


def _recipes(root: Path, places: Sequence[Path], max_ranks: int) -> list[Recipe]:
    """Those of a commit, in the places that it has."""
    present = [root / place for place in places if _is_inside(root / place, root)]
    if places and not present:
        return []
    try:
        return collect.collect(root, (), max_ranks, present)
    except TTraceError:
        return []


def _is_inside(path: Path, root: Path) -> bool:
    return path.exists() and path.resolve().is_relative_to(root.resolve())


def check(pull: Pull, todo: Plan, tell: Say) -> tuple[ExitCode, list[Annotation]]:
    """Check the jobs that run changed code; returns the exit code and annotations of lines."""
    annotations: list[Annotation] = []
    answers: list[Result] = []
    everything: list[Files | None] = []
    for key, task in todo.tasks.items():
        job = task.job
        name = f"{clean(task.name)} ({key}, {job.ranks} ranks)"
        record = pull.ran(job)
        if record is not None and not any(reached.changed(record, pull.head.root)):
            tell(f"skipped: {name}: none of the code that it runs has changed since it was checked")
            pull.keep(job, pull.head, record)
            everything.append(record)
            continue
        why = "what it runs is not known" if record is None else "it runs changed code"
        tell(f"checking: {name}: {why}")
        head = pull.check(job, pull.head)
        tell(f"{head.answer}: {name}{f': {head.why}' if head.why else ''}")
        if head.answer is not Result.COULD_NOT_CHECK:
            everything.append(head.ran)
        if head.answer is Result.EQUIVALENT:
            answers.append(head.answer)
            continue
        base = pull.check(job, pull.base)
        tell(f"{base.answer} before the pull request: {name}{f': {base.why}' if base.why else ''}")
        if head.answer is Result.COULD_NOT_CHECK:
            # A recipe may have been changed because its job no longer runs.
            broken = base.answer is not Result.COULD_NOT_CHECK and not task.is_dropped
            level = Level.ERROR if broken else Level.WARNING
            answers += [head.answer] if broken else []
            title = "ttrace could not check" + (" this pull request" if broken else "")
            why = f"{name}: {head.why}"
            annotations.append(Annotation(level, Topic.NOT_CHECKED, title, why))
            continue
        culprits = new_culprits(head, base)
        if base.answer is Result.DIVERGED and not culprits:
            answers.append(Result.EQUIVALENT)
            text = f"{name} diverges in {_names(head.culprits)}, as it does without this change"
            title = "ttrace: not from this pull request"
            annotations.append(Annotation(Level.NOTICE, Topic.DIVERGED_BEFORE, title, text))
            continue
        answers.append(Result.DIVERGED)
        tell(f"looking for the change to blame: {name}")
        annotations += _annotations(pull, name, head, culprits, pull.blamed(job, tell))
    if not answers and not annotations:
        tell("no recipe runs changed code: nothing was checked")
    else:
        pull.tidy()
    # Several jobs may show the same fault on the same line: what each did has been told.
    once = {(a.title, a.file, a.line, a.file or a.message): a for a in reversed(annotations)}
    annotations = [*reversed(once.values())]
    code = ExitCode.EQUIVALENT
    if Result.DIVERGED in answers:
        code = ExitCode.DIVERGED
    elif todo.has_lost or Result.COULD_NOT_CHECK in answers or (annotations and not answers):
        code = ExitCode.COULD_NOT_CHECK
    return code, [*todo.annotations, *annotations, *_not_executed(pull, todo, everything, tell)]


def _not_executed(
    pull: Pull, todo: Plan, ran: Sequence[Files | None], tell: Say
) -> list[Annotation]:
    """A warning per changed function that no recipe runs, or per file if these are many."""
    known = [files for files in ran if files is not None]
    scripts = {
        Path(task.job.script).relative_to(pull.head.root).as_posix() for task in todo.tasks.values()
    }
    packages = (pull.inside / "megatron").as_posix() + "/"
    idle_by_file: list[tuple[str, list[changes.Change]]] = []
    for file in pull.changed_files:
        if not (file in scripts or (file.startswith(packages) and file.endswith(".py"))):
            continue
        changed = changes.changes(*(_content(side.root / file) for side in (pull.base, pull.head)))
        idle = [
            change for change in changed if not any(_runs(files, file, change) for files in known)
        ]
        if not idle:
            continue
        if len(known) < len(ran):
            tell("what some recipes run is not known, nor is which changed code none of them runs")
            return []
        idle_by_file.append((file, idle))
    if sum(len(idle) for _, idle in idle_by_file) > _MOST:
        return [_idle(file, *idle) for file, idle in idle_by_file]
    return [_idle(file, change) for file, idle in idle_by_file for change in idle]


def _idle(file: str, *idle: changes.Change) -> Annotation:
    """A warning of changed functions of a file."""
    names = [change.name or "lines outside of functions" for change in idle]
    shown = ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")
    title = f"ttrace: changed, but not executed by any recipe: {shown}"
    text = f"{file}: {shown}: changed, but no recipe runs it: nothing here was checked"
    return Annotation(
        level=Level.WARNING,
        topic=Topic.NOT_EXECUTED,
        title=in_one_line(title),
        message=in_one_line(text),
        file=file,
        line=idle[0].line,
    )


def _runs(files: Files, file: str, change: changes.Change) -> bool:
    """Whether changed code ran; a function that is not seen to run may have, if it was imported."""
    functions = files.get(file)
    return functions is not None and (not change.is_seen or change.name in functions)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def new_culprits(head: Checked, base: Checked) -> tuple[Culprit, ...]:
    """The culprits that the base lacks, in any layer."""
    theirs = {_folded(culprit) for culprit in base.culprits}
    return tuple(culprit for culprit in head.culprits if _folded(culprit) not in theirs)


def _folded(culprit: Culprit) -> tuple[object, ...]:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", culprit.name), culprit.kind, culprit.direction


def _names(culprits: Sequence[Culprit]) -> str:
    return (
        ", ".join(dict.fromkeys(clean(culprit.name) for culprit in culprits[:3])) or "some tensors"
    )


def _annotations(
    pull: Pull, name: str, head: Checked, culprits: Sequence[Culprit], blamed: Blame | None
) -> Iterator[Annotation]:
    """One per cause, on the change to blame.

    If that is not known, on the line to look at; and, if its file has not changed, on changed code
    that ran.
    """
    different = sorted(reached.changed(head.ran or {}, pull.base.root))
    ran = [f"{file}{f' ({function})' if function else ''}" for file, function in different]
    suspects = {file for file, _ in different}
    # Functions that ran tell more than files that were only imported.
    suspects = {file for file, function in different if function} or suspects
    hunks = [hunk for hunk in pull.hunks if hunk.file in suspects] or pull.hunks
    first = {hunk.file: max(hunk.line, 1) for hunk in reversed(hunks)}
    places = sorted(first.items())[:3] or [("", 0)]
    report = f"report: {head.folder / 'report.html'}"
    changed = f"changed code that it ran: {', '.join(ran[:_MOST]) or 'not known'}"
    placed: set[str] = set()
    for group in table.by_cause(culprits)[:_MOST]:
        culprit = group[0]
        causes = [f"{label}: {text}" for label, text in wording.cause_pairs(culprit)]
        file, line = place(culprit, pull.hunks, pull.head.root, pull.inside)
        if not file:
            file, line = places[0]
        if blamed is not None and blamed.changes:
            change = blamed.of(pattern(module_of(culprit.name)))
            file, line = change.hunks[0].file, change.hunks[0].line
            places_of = [f"blame: {blaming.place(hunk)}" for hunk in change.hunks[:_MOST]]
            causes = [*places_of, blaming.sentence(blamed), *causes]
        placed.add(file)
        message = "\n".join([f"{name}: {wording.sentence(culprit)}", *causes, changed, report])
        title = f"ttrace: diverged in {_names(group)}"
        yield Annotation(Level.ERROR, Topic.DIVERGED, title, message, file=file, line=line)
    if placed and not placed.isdisjoint({"", *first}):
        return
    level = Level.WARNING if placed else Level.ERROR
    title = f"ttrace: {_names(culprits)} diverged; this code ran, and has changed"
    for file, line in places:
        message = "\n".join([name, changed, report])
        yield Annotation(level, Topic.SUSPECT, title, message, file=file, line=line)


def place(culprit: Culprit, hunks: Sequence[Hunk], root: Path, inside: Path) -> tuple[str, int]:
    """The file and line of the repository to look at; ``("", 0)`` if its code is elsewhere.

    If its file is a changed one, the changed line next to it: only these are shown in a review.
    """
    if not culprit.places:
        return "", 0
    path, line = inside / culprit.places[0].file, culprit.places[0].line
    if ".." in path.parts or path.is_absolute() or not (root / path).is_file():
        return "", 0
    changed = [hunk for hunk in hunks if hunk.file == path.as_posix()]
    if changed:
        hunk = min(changed, key=lambda hunk: hunk.distance(line))
        line = min(max(line, hunk.line), hunk.line + max(hunk.count, 1) - 1)
    return path.as_posix(), max(line, 1)
