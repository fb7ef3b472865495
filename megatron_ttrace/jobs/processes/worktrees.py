# SPDX-License-Identifier: Apache-2.0
"""Commits of a git checkout, each in a worktree of its own; the checkout's files are left alone."""

import dataclasses
import functools
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_CONTEXT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Hunk:
    """Changed lines of a file: where they begin in the new one, how many it has, and git's text.

    ``file`` is a path in the repository.
    """

    file: str
    line: int
    count: int
    text: str

    def distance(self, line: int) -> int:
        """How many lines are between these and a line of the new file."""
        return max(self.line - line, line - (self.line + self.count - 1), 0)


class Checkout:
    """A git checkout."""

    def __init__(self, folder: Path, how: str = "") -> None:
        """Find it from a folder in it. Raises ``TTraceError`` when there is none.

        ``how``: by which option, for its message.
        """
        self.root = folder
        try:
            self.root = Path(self._git("rev-parse", "--show-toplevel").strip())
        except TTraceError as error:
            raise TTraceError(f"{folder} is not in a git checkout: give Megatron's{how}") from error

    def commit(self, name: str) -> str:
        """The id of a commit. Raises ``TTraceError`` when there is no such commit."""
        words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        try:
            return self._git(*words).strip()
        except TTraceError as error:
            raise TTraceError(f"{name!r} is not a commit of {self.root}") from error

    def between(self, good: str, bad: str) -> tuple[str, ...]:
        """The commits after ``good`` up to ``bad``, the oldest first; of merges the first parents.

        Raises ``TTraceError`` when ``bad`` does not descend from ``good``.
        """
        if good == bad:
            raise TTraceError(f"GOOD and BAD are the same commit, {good[:12]}")
        listed = self._git("rev-list", "--first-parent", "--reverse", f"{good}..{bad}").split()
        parent = self._git("rev-parse", f"{listed[0]}^1").strip() if listed else ""
        if parent != good:
            raise TTraceError(
                f"{bad[:12]} does not descend from {good[:12]} by first parents: give GOOD BAD, in "
                "this order"
            )
        return tuple(listed)

    def fork_point(self, base: str, head: str) -> str:
        """The last commit that two have in common.

        Raises ``TTraceError`` when there is none, as in a shallow clone.
        """
        try:
            return self._git("merge-base", base, head).strip()
        except TTraceError as error:
            raise TTraceError(
                f"{base[:12]} and {head[:12]} have no commit in common: fetch the whole history "
                "(actions/checkout: fetch-depth: 0; GitLab: GIT_DEPTH: 0)"
            ) from error

    def tree(self, commit: str) -> str:
        """The id of a commit's content."""
        return self._git("rev-parse", "--verify", f"{commit}^{{tree}}").strip()

    def changed_files(self, commit: str, base: str) -> list[str]:
        """Paths in the repository of the files of a commit that differ from another one."""
        words = ("diff", "--name-only", "-z", "--no-renames", "--diff-filter=d", base, commit)
        return [name for name in self._git(*words).split("\0") if name]

    def is_edited(self) -> bool:
        """Whether tracked files differ from the commit that is checked out."""
        return bool(self._git("status", "--porcelain", "--untracked-files=no").strip())

    def described(self, commit: str) -> str:
        """Author, date and subject of a commit."""
        line = self._git("show", "--no-patch", "--format=%an, %ad: %s", "--date=short", commit)
        return clean(line.strip(), NOTE_LIMIT)

    def hunks(self, commit: str, base: str = "", context: int = _CONTEXT) -> list[Hunk]:
        """What a commit changed, compared with another one, or else with its first parent."""
        # Attributes of the repository decide neither which files are text nor how they are shown.
        words = ["-c", "core.quotePath=false", "diff", "--no-color", "--no-ext-diff"]
        words += ["--no-textconv", "--text", "--src-prefix=a/", "--dst-prefix=b/"]
        words += [f"--unified={context}"]
        hunks: list[Hunk] = []
        file = ""
        old = new = 0  # lines of the hunk that are to come
        for line in self._git(*words, base or f"{commit}^1", commit).split("\n"):
            if old > 0 or new > 0:
                old -= line[:1] in ("-", " ")
                new -= line[:1] in ("+", " ")
                hunks[-1] = dataclasses.replace(hunks[-1], text=f"{hunks[-1].text}\n{line}")
            elif line.startswith(("--- ", "+++ ")) and line[4:] != os.devnull:
                # A deleted file has a name only before. A name with a space ends with a tab.
                name = line[4:].removesuffix("\t")
                file = name[2:] if name.startswith(("a/", "b/")) else name
            elif match := _HUNK.match(line):
                old, new = int(match[1] or 1), int(match[3] or 1)
                hunks.append(Hunk(file, int(match[2]), new, line))
        return hunks

    @contextmanager
    def at(self, commit: str, folder: Path) -> Iterator[Path]:
        """A worktree of a commit in ``folder``, which is removed afterwards.

        Raises ``ForeignError`` when the directory that holds it was not made for worktrees.
        """
        owned.make(folder.parent, whole=True)
        self._remove(folder)
        self._git("worktree", "add", "--detach", "--force", str(folder), commit)
        try:
            yield folder
        finally:
            self._remove(folder)

    def _remove(self, folder: Path) -> None:
        if os.path.lexists(folder):
            owned.wipe(folder)
        # Not pruned: others of the user's may be missing for a while.
        with suppress(TTraceError):
            self._git("worktree", "remove", "--force", str(folder))

    def _git(self, *words: str) -> str:
        return git(self.root, *words)


def git(folder: Path, *words: str, seconds: float | None = None) -> str:
    """What git prints in a folder. Its index is left alone, and no configured program runs.

    Such programs are hooks, monitors, filters of content, and what shows a difference. Raises
    ``TTraceError`` when git is absent, fails, or takes longer than ``seconds``.
    """
    return _git(folder, words, seconds, (*_NO_PROGRAMS, *_no_filters(folder, seconds)))


_NO_PROGRAMS = (
    *("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}"),
    *("-c", "diff.ignoreSubmodules=dirty", "-c", "log.showSignature=false"),
)
_FILTERS = r"^filter\..*\.(clean|smudge|process|required)$"


@functools.cache
def _no_filters(folder: Path, seconds: float | None) -> tuple[str, ...]:
    """Options that switch off every filter of content: git runs them to see what is modified."""
    try:
        words = ("config", "-z", "--name-only", "--get-regexp", _FILTERS)
        keys = sorted({*_git(folder, words, seconds).split("\0")} - {""})
    except TTraceError:
        return ()
    pairs = ((key, "false" if key.endswith(".required") else "") for key in keys)
    return tuple(word for key, value in pairs for word in ("-c", f"{key}={value}"))


def _git(
    folder: Path, words: Sequence[str], seconds: float | None, options: Sequence[str] = ()
) -> str:
    # In a git hook, git's variables name another repository.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *options, "-C", str(folder), *words],
            env={**inherited, "GIT_LFS_SKIP_SMUDGE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise TTraceError(f"git cannot be run ({error})") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = clean(lines[-1] if lines else f"exit code {done.returncode}", NOTE_LIMIT)
        raise TTraceError(f"git {words[0]} in {folder} failed: {reason.removeprefix('fatal: ')}")
    return done.stdout.decode(errors="replace")
