# SPDX-License-Identifier: Apache-2.0
"""A pull request: the recipes that its changes can reach, checked with it and without it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_ttrace.errors import ExitCode, TTraceError
from megatron_ttrace.evaluation.recipes import collect, reached
from megatron_ttrace.evaluation.recipes.collect import SmallJob
from megatron_ttrace.evaluation.recipes.reached import Files, Records
from megatron_ttrace.mcore.shrink import documents
from megatron_ttrace.processes import apart
from megatron_ttrace.processes.worktrees import Checkout, Hunk
from megatron_ttrace.report import table, wording
from megatron_ttrace.report.review import Annotation, Level
from megatron_ttrace.runtime import api
from megatron_ttrace.trace.records import Culprit, Result
from megatron_ttrace.trace.sanitise import clean, in_one_line

type Say = Callable[[str], None]

_PLACE = re.compile(r"(?P<file>[^\s:]+\.py):(?P<line>\d+)")
_MOST = 10
"""Annotations of one kind that GitHub shows of a step."""
_RECORDS = "reached.json"


@dataclasses.dataclass(frozen=True)
class Checked:
    """A check of a job: its answer, its culprits or why there is no answer, and what ran."""

    answer: Result
    culprits: tuple[Culprit, ...] = ()
    why: str = ""
    folder: Path = Path()
    ran: Files | None = None


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
        """Make the worktree of ``head``; ``inside`` is where Megatron is in the repository."""
        self.inside = inside
        self.base = base
        self.directory = directory
        self.records: Records = Records.load(directory / _RECORDS)
        self.hunks: list[Hunk] = checkout.hunks(head, base, context=0)
        self._checkout, self._commit, self._quiet, self._stack = checkout, head, quiet, stack
        self.used: set[str] = set()
        # Always the same places: they may be in arguments, and so in the names of jobs.
        self.head = self._tree("head", head)

    def at_head(self, job: SmallJob) -> Checked:
        """Check the pull request."""
        found = self._check(job, self.head, self._commit)
        # What diverges must be checked again. Else the same code has the same answer.
        if found.answer is Result.EQUIVALENT:
            self._keep(job, found)
        return found

    def at_base(self, job: SmallJob) -> Checked:
        """Check what the pull request began with."""
        found = self._check(job, self.base_tree(), self.base)
        if found.answer is not Result.COULD_NOT_CHECK:
            self._keep(job, found)
        return found

    def base_tree(self) -> Path:
        """The files that the pull request began with."""
        tree = self.directory / "trees" / "base"
        return tree if tree.is_dir() else self._tree("base", self.base)

    def _tree(self, name: str, commit: str) -> Path:
        tree = (self.directory / "trees" / name).resolve()
        tree.parent.mkdir(parents=True, exist_ok=True)
        return self._stack.enter_context(self._checkout.at(commit, tree))

    def _check(self, job: SmallJob, root: Path, commit: str) -> Checked:
        script = root / Path(job.script).relative_to(self.head)
        if not script.is_file():
            return Checked(Result.COULD_NOT_CHECK, why=f"{script.name}: no such script")
        folder = self.directory / "checks" / commit[:12] / job.key
        log = self.directory / "ran.jsonl"
        references = (self.directory / "references").resolve()
        cached = set(os.listdir(references)) if references.is_dir() else set()
        prefix = documents.write(self.directory / "data" / "text", (documents.SFT,))
        words = [str(log), str(root), "check", "--nproc-per-node", str(job.ranks)]
        words += ["--ttrace-dir", str(folder), "--ttrace-no-wandb", "--", str(script)]
        words += [*job.arguments, *documents.arguments(str(script), prefix, job.arguments)]
        path = [str(root / self.inside), os.environ.get("PYTHONPATH", "")]
        code, said = apart.ttrace(
            sys.executable,
            words,
            {
                **os.environ,
                **dict(job.environment),
                "TTRACE_CACHE": str(references),
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
            },
            quiet=self._quiet,
            module=reached.MODULE,
        )
        if code == ExitCode.COULD_NOT_CHECK:
            return Checked(Result.COULD_NOT_CHECK, why=in_one_line(said), folder=folder)
        if code not in (ExitCode.EQUIVALENT, ExitCode.DIVERGED):
            raise TTraceError(f"the check of {commit[:12]} ended with exit code {code}: {said}")
        report = api.load_report(folder)
        ran = reached.read_log(log, root, job.ranks)
        reference = (folder / "reference").resolve()
        self.used.add(reference.name)
        if ran is not None and reference.parent == references and reference.name in cached:
            # The reference was made by an earlier check: what it ran counts too.
            made = self.records.references.get(reference.name)
            ran = None if made is None else reached.merged(made, ran)
        elif ran is not None:
            self.records.references[reference.name] = ran
        return Checked(report.verdict, report.culprits, folder=folder, ran=ran)

    def _keep(self, job: SmallJob, found: Checked) -> None:
        self.records.jobs.pop(job.key, None)
        if found.ran is not None:
            self.records.jobs[job.key] = found.ran
        self.records.save(self.directory / _RECORDS)

    def tidy(self) -> None:
        """Remove the references of other commits, which no check can use any more."""
        references = self.directory / "references"
        for name in os.listdir(references) if references.is_dir() else ():
            if name not in self.used and (references / name / "meta.json").is_file():
                shutil.rmtree(references / name, ignore_errors=True)
        for name in self.records.references.keys() - self.used:
            del self.records.references[name]
        self.records.save(self.directory / _RECORDS)


def jobs_of(
    pull: Pull, folder: Path, given: Sequence[Path], max_ranks: int, tell: Say
) -> dict[str, tuple[str, SmallJob]]:
    """The different small jobs of the recipes at HEAD, with a name for people."""
    root = pull.head / pull.inside
    places = [root / os.path.relpath(folder / place, folder) for place in given]
    for one, place in zip(given, places, strict=True):
        if not place.exists() or not place.resolve().is_relative_to(root.resolve()):
            raise TTraceError(f"{one} is not in HEAD: give a committed path below {folder}")
    recipes = collect.collect(root, (), max_ranks, places)
    found: dict[str, tuple[str, SmallJob]] = {}
    for recipe in recipes:
        if recipe.kind is collect.Kind.NOT_SHRUNK:
            tell(f"not checked: {recipe.name}: {in_one_line(recipe.why)}")
        for job in recipe.jobs:
            found.setdefault(job.key, (recipe.name, job))
    if not found:
        raise TTraceError(
            "no recipe can be checked: give model_config.yaml files or shell scripts that start a "
            "training with --recipes DIR or --recipe FILE"
        )
    return found


def check(
    pull: Pull, jobs: dict[str, tuple[str, SmallJob]], tell: Say
) -> tuple[ExitCode, list[Annotation]]:
    """Check the jobs that run changed code: the exit code, and what to say of lines."""
    said: list[Annotation] = []
    answers: list[Result] = []
    for key, (recipe, job) in jobs.items():
        name = f"{recipe} ({key}, {job.ranks} ranks)"
        record = pull.records.jobs.get(key)
        if record is not None and not any(reached.changed(record, pull.head)):
            tell(f"skipped: {name}: none of the code that it runs has changed since it was checked")
            continue
        why = "what it runs is not known" if record is None else "it runs changed code"
        tell(f"checking: {name}: {why}")
        head = pull.at_head(job)
        tell(f"{head.answer}: {name}{f': {head.why}' if head.why else ''}")
        if head.answer is Result.EQUIVALENT:
            answers.append(head.answer)
            continue
        base = pull.at_base(job)
        tell(f"{base.answer} before the pull request: {name}{f': {base.why}' if base.why else ''}")
        if head.answer is Result.COULD_NOT_CHECK:
            broken = base.answer is not Result.COULD_NOT_CHECK
            level = Level.ERROR if broken else Level.WARNING
            answers += [head.answer] if broken else []
            title = "ttrace could not check" + (" this pull request" if broken else "")
            said.append(Annotation(level, title, f"{name}: {head.why}"))
            continue
        culprits = new_culprits(head, base)
        if base.answer is Result.DIVERGED and not culprits:
            answers.append(Result.EQUIVALENT)
            text = f"{name} diverges in {_names(head.culprits)}, as it does without this change"
            said.append(Annotation(Level.NOTICE, "ttrace: not from this pull request", text))
            continue
        answers.append(Result.DIVERGED)
        said += _annotations(pull, name, head, culprits)
    if len(answers) + len(said) == 0:
        tell("no recipe runs changed code: nothing was checked")
    else:
        pull.tidy()
    if Result.DIVERGED in answers:
        return ExitCode.DIVERGED, said
    unchecked = Result.COULD_NOT_CHECK in answers or (said and not answers)
    return ExitCode.COULD_NOT_CHECK if unchecked else ExitCode.EQUIVALENT, said


def new_culprits(head: Checked, base: Checked) -> tuple[Culprit, ...]:
    """The culprits that the base has not, in any layer."""
    theirs = {_folded(one) for one in base.culprits}
    return tuple(one for one in head.culprits if _folded(one) not in theirs)


def _folded(culprit: Culprit) -> tuple[object, ...]:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", culprit.name), culprit.kind, culprit.direction


def _names(culprits: Sequence[Culprit]) -> str:
    return ", ".join(dict.fromkeys(clean(one.name) for one in culprits[:3])) or "some tensors"


def _annotations(
    pull: Pull, name: str, head: Checked, culprits: Sequence[Culprit]
) -> Iterator[Annotation]:
    """One per cause on the line to look at; if no file is a changed one, also on changed code."""
    different = sorted(reached.changed(head.ran or {}, pull.base_tree()))
    ran = [f"{file}{f' ({function})' if function else ''}" for file, function in different]
    suspects = {file for file, _ in different}
    # Functions that ran tell more than files that were only imported.
    suspects = {file for file, function in different if function} or suspects
    hunks = [one for one in pull.hunks if one.file in suspects] or pull.hunks
    first = {one.file: max(one.line, 1) for one in reversed(hunks)}
    places = sorted(first.items())[:3] or [("", 0)]
    report = f"report: {head.folder / 'report.html'}"
    changed = f"changed code that it ran: {', '.join(ran[:_MOST]) or 'not known'}"
    placed: set[str] = set()
    for group in table.by_cause(culprits)[:_MOST]:
        one = group[0]
        told = [f"{label}: {text}" for label, text in wording.cause_pairs(one)]
        found = place(one, pull.hunks, pull.head, pull.inside)
        file, line = found if found[0] else places[0]
        placed.add(file)
        message = "\n".join([f"{name}: {wording.sentence(one)}", *told, changed, report])
        yield Annotation(Level.ERROR, f"ttrace: diverged in {_names(group)}", message, file, line)
    if placed and not placed.isdisjoint({"", *first}):
        return
    level = Level.WARNING if placed else Level.ERROR
    title = f"ttrace: {_names(culprits)} diverged; this code ran, and has changed"
    for file, line in places:
        yield Annotation(level, title, "\n".join([name, changed, report]), file, line)


def place(culprit: Culprit, hunks: Sequence[Hunk], root: Path, inside: Path) -> tuple[str, int]:
    """The file and line of the repository to look at; ``("", 0)`` if its code is elsewhere.

    If its file is a changed one, the changed line next to it: only these are shown in a review.
    """
    match = _PLACE.search(culprit.where)
    if match is None:
        return "", 0
    path, line = inside / match["file"], int(match["line"])
    if ".." in path.parts or path.is_absolute() or not (root / path).is_file():
        return "", 0
    near = [one for one in hunks if one.file == path.as_posix()]
    if near:
        hunk = min(near, key=lambda one: one.distance(line))
        line = min(max(line, hunk.line), hunk.line + max(hunk.count, 1) - 1)
    return path.as_posix(), max(line, 1)
