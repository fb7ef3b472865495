# SPDX-License-Identifier: Apache-2.0
"""``ttrace bisect``: which commit of Megatron made a job diverge."""

import argparse
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.cli import command, diff, training
from megatron_ttrace.jobs import flags
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.jobs.processes.worktrees import Checkout, Hunk
from megatron_ttrace.jobs.settings import Settings, checking, split
from megatron_ttrace.saved import api, blame
from megatron_ttrace.saved.bisection import FirstBad, first_bad
from megatron_ttrace.trace import owned, shared
from megatron_ttrace.trace.blamed import Blame
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.records import Culprit, Result
from megatron_ttrace.trace.sanitise import clean, in_one_line

SUMMARY = "find the commit of Megatron that makes a job diverge"
EPILOG = """\
examples:
  ttrace bisect core_v0.18.0 main -- torchrun --nproc-per-node 2 pretrain_gpt.py ...
  ttrace bisect --checkout Megatron-LM v1 v2 -- python my_pretrain.py ...
  ttrace bisect --against before v1 v2 -- torchrun --nproc-per-node 2 pretrain_gpt.py ...

Commits from GOOD, which is trusted, to BAD, along first parents, are checked in git worktrees below
--directory; the files of the checkout are not touched. Of 64 commits 7 are checked. A commit that
cannot be checked is skipped. Which part of a layout a job needs: ttrace hunt.

exit code: 0 a single commit was found, 2 otherwise
"""
_SHOWN = 3
"""Hunks of the commit that are printed."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--checkout",
        type=flags.path,
        metavar="DIR",
        help="the Megatron checkout (default: that of the script)",
    )
    parser.add_argument(
        "--against",
        metavar="COMMAND|TRACE",
        help="compare every commit with this run instead of its own single-device reference",
    )
    command.add_directory(parser, "ttrace-bisect")
    parser.add_argument("--quiet", action="store_true", help="do not print progress")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    training.add_arguments(parser, "GOOD BAD -- COMMAND")


def run(args: argparse.Namespace) -> int:
    """Search commits."""
    words = args.command_words
    if args.recipe is None and words and "--" not in words:
        raise TTraceError(
            f"no training command: give it after --, ttrace bisect {' '.join(words[:2])} -- COMMAND"
        )
    at = words.index("--") if "--" in words else len(words)
    ends, args.command_words = words[:at], words[at:]
    if len(ends) != 2 or any(end.startswith("-") for end in ends):
        raise TTraceError("give two commits after all options: ttrace bisect GOOD BAD -- COMMAND")
    command_ = training.read(args)
    if command_.nodes > 1:
        raise TTraceError("the command is for several machines: see ttrace shrink for a small one")
    return _commits(args, command_, *ends)


@dataclasses.dataclass(frozen=True)
class _Checks:
    """Checks of a command with commits of a checkout."""

    checkout: Checkout
    command: Command
    settings: Settings
    interpreter: str
    directory: Path
    against: str | None
    quiet: bool
    reports: dict[str, api.Report] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, commit: str) -> Result:
        """Check one commit."""
        folder = self.directory / "checks" / commit[:12]
        options = ["--against", self.against] if self.against else []
        cache = {"TTRACE_CACHE": str((self.directory / "references").resolve())}
        with self._placed(commit, folder) as (script, trial):
            words = checking(script, trial.arguments, trial.ranks, trial.settings, *options)
            environment = {**cache, **trial.environment}
            code, reason = apart.ttrace(trial.interpreter, words, environment, quiet=self.quiet)
        if code in (ExitCode.EQUIVALENT, ExitCode.DIVERGED):
            self.reports[commit] = api.load_report(folder)
            return self.reports[commit].verdict
        if code != ExitCode.COULD_NOT_CHECK:
            raise TTraceError(f"the check of {commit[:12]} ended with exit code {code}: {reason}")
        self.skipped[commit] = in_one_line(reason)
        return Result.COULD_NOT_CHECK

    def blamed(self, commit: str, good: str, say: Callable[[str], None]) -> Blame | None:
        """Which changes of a commit are to blame, compared with a good one; ``None``: not known."""
        with self._placed(commit, self.reports[commit].directory) as (script, trial):
            return blame.run_apart(trial, script, good, say, quiet=self.quiet)

    @contextlib.contextmanager
    def _placed(self, commit: str, report: Path) -> Iterator[tuple[Path, blame.Trial]]:
        """The script in the worktree of a commit, and how it is checked there; it imports that."""
        environment = {**os.environ, **self.command.environment}
        checkout = self.checkout.root
        tree = self.directory / "trees" / commit[:12]
        with self.checkout.at(commit, tree.resolve()) as root:

            def moved(path: Path) -> Path:
                return root / path.relative_to(checkout) if path.is_relative_to(checkout) else path

            script = Path(self.command.script).resolve()
            entries = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
            path = [] if script.is_relative_to(checkout) else [root]
            path += [moved(Path(entry).resolve()) for entry in entries]
            environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
            yield (
                moved(script),
                blame.Trial(
                    interpreter=self.interpreter,
                    arguments=self.command.arguments,
                    ranks=self.command.ranks or 1,
                    settings=self.settings.unlogged(report),
                    environment=environment,
                ),
            )


def _commits(args: argparse.Namespace, command_: Command, good: str, bad: str) -> int:
    script = scripts.require(command_.script)
    checkout = Checkout(args.checkout or script.resolve().parent, " with --checkout DIR")
    commits = checkout.between(checkout.commit(good), checkout.commit(bad))
    say = command.progress_of(args)
    quiet = say is command.silent
    interpreter = apart.interpreter_of(command_)
    settings, theirs = split(command_.arguments)
    command_ = dataclasses.replace(command_, arguments=tuple(theirs))
    against: str | None = None
    if args.against is not None:
        # Once, and as it is in the user's shell: a commit has its own PYTHONPATH.
        against = str(diff.other_run(args.against, settings, args.directory, say))
    training.enter(command_)
    checks = _Checks(checkout, command_, settings, interpreter, args.directory, against, quiet)

    def check(number: int) -> Result:
        commit = commits[number]
        say(f"commit {number + 1} of {len(commits)}: {commit[:12]} {checkout.described(commit)}")
        answer = checks(commit)
        say(f"{commit[:12]}: {answer.value}")
        return answer

    blamed: Blame | None = None
    with shared.alone(args.directory, ["trees"]):
        try:
            first = first_bad(len(commits), check)
            if first is not None and args.against is None:
                bad = commits[first.number]
                say(f"looking for the changes of {bad[:12]} to blame")
                before = commits[min((*first.suspects, first.number))]
                blamed = checks.blamed(bad, f"{before}^1", say)
        finally:
            owned.discard(args.directory / "trees")
    if first is None:
        why = checks.skipped.get(commits[-1], "it is equivalent")
        raise TTraceError(f"BAD does not diverge, so there is nothing to find: {why}")
    answer = _answer(checks, commits, first, blamed)
    print(json.dumps(answer, indent=1)) if args.json else _show(answer)
    return ExitCode.COULD_NOT_CHECK if first.suspects else ExitCode.EQUIVALENT


def _answer(
    checks: _Checks, commits: Sequence[str], first: FirstBad, blamed: Blame | None
) -> dict[str, Any]:
    commit = commits[first.number]
    report = checks.reports[commit]
    culprits = report.culprits
    return {
        "commit": commit,
        "described": checks.checkout.described(commit),
        "commits": len(commits),
        "checked": len(checks.reports) + len(checks.skipped),
        "suspects": [commits[number] for number in first.suspects],
        "skipped": checks.skipped,
        "culprits": [
            {
                "name": culprit.name,
                "direction": culprit.direction.value,
                "explanation": culprit.explanation,
                "where": culprit.where,
            }
            for culprit in culprits
        ],
        "blame": None if blamed is None else blamed.to_json(),
        "lines": _lines(blamed)
        or [hunk.text for hunk in nearest(checks.checkout.hunks(commit), culprits)],
        "report": str(report.directory),
    }


def _lines(blamed: Blame | None) -> list[str]:
    """The hunks to blame, and how that is known."""
    if blamed is None or not blamed.changes:
        return []
    from megatron_ttrace.report import blame as blaming

    hunks = [hunk for change in blamed.changes for hunk in change.hunks]
    texts = ["\n".join([blaming.place(hunk), *blaming.lines(hunk)]) for hunk in hunks]
    return [*texts, blaming.sentence(blamed)]


def nearest(hunks: Sequence[Hunk], culprits: Sequence[Culprit]) -> list[Hunk]:
    """A commit's changes, those next to the code of a culprit first; only these if there are any.

    The file to look at (``Place.file``) may be given from Megatron's folder on.
    """
    places = [place for culprit in culprits for place in culprit.places[:1]]

    def distance(hunk: Hunk) -> float:
        file = Path(hunk.file).parts
        tails = [(place, Path(place.file).parts) for place in places]
        lines = [p.line for p, tail in tails if file[-len(tail) :] == tail[-len(file) :]]
        return min(map(hunk.distance, lines), default=float("inf"))

    ordered = sorted(hunks, key=distance)
    near = [hunk for hunk in ordered if distance(hunk) < float("inf")] or ordered
    return [dataclasses.replace(hunk, text=f"{hunk.file}\n{hunk.text}") for hunk in near[:_SHOWN]]


def _show(answer: dict[str, Any]) -> None:
    at = answer["commit"][:12]
    counted = f"{answer['checked']} of {answer['commits']} commits were checked"
    if answer["suspects"]:
        suspects = ", ".join(commit[:12] for commit in answer["suspects"])
        print(f"ttrace: the first bad commit is {at} or, which could not be checked, {suspects}")
        print(f"({counted})")
    else:
        print(f"ttrace: {at} is the first commit with which the job diverges ({counted})")
    print(f"commit     {answer['commit']} {answer['described']}")
    names: dict[tuple[str, str, str], list[str]] = {}
    for culprit in answer["culprits"]:
        same = culprit["direction"], culprit["explanation"], culprit["where"]
        names.setdefault(same, []).append(clean(culprit["name"]))
    for (direction, cause, place), those in names.items():
        more = f" and {len(those) - 1} more with this cause" if len(those) > 1 else ""
        print(f"culprit    {those[0]}{more}, {direction}")
        print(f"           cause {clean(cause, 300)}; look at {clean(place)}")
    print(f"report     {answer['report']}")
    for commit, why in answer["skipped"].items():
        print(f"skipped    {commit[:12]}: {why}")
    for text in answer["lines"]:
        print()
        for line in text.splitlines():
            print(clean(line, 300))
