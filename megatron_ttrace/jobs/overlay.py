# SPDX-License-Identifier: Apache-2.0
"""The user's Megatron, a good one to compare it with, and a copy in which hunks can be left out.

The user's files are only read. The copy lies in a directory of ours: packages of Megatron, and
folders with files that differ, are copied, everything else is linked.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from megatron_ttrace.jobs import edited, hunks, provenance
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.hunks import Splice
from megatron_ttrace.jobs.processes import worktrees
from megatron_ttrace.trace import changes, files, owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.executed import Edit, Edits

_CORE = "megatron.core"
_EPOCH = 1_000_000_000
"""Seconds: files of the copy are modified from then on, each at a time of its own. Python compares
a file's time and size with those of what it compiled."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """The Megatron that a script imports.

    ``root`` is the folder of its git checkout, or else the one that holds ``megatron/``, which is
    ``inside`` the root. ``is_checkout``: whether git tracks it.
    """

    root: Path
    inside: Path
    script: Path
    is_checkout: bool

    @classmethod
    def of(cls, script: Path) -> Self:
        """What ``python SCRIPT`` would import here; raises ``TTraceError`` if there is none."""
        core = scripts.origins(scripts.search_path(script)).get(_CORE)
        if core is None:
            raise TTraceError(f"{script} would find no {_CORE}: set PYTHONPATH, as for training")
        home = Path(core).resolve().parents[2]
        at = provenance.git(home, "rev-parse", "--show-toplevel")
        tracked = provenance.git(home, "ls-files", "--", "megatron/core/__init__.py")
        if at and tracked:
            root = Path(at.strip()).resolve()
            return cls(root, home.relative_to(root), script.resolve(), is_checkout=True)
        return cls(home, Path(), script.resolve(), is_checkout=False)

    @property
    def packages(self) -> Path:
        """The folder of Megatron's packages."""
        return self.root / self.inside / "megatron"


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The content of the files that differ between a good tree, named ``since``, and the user's."""

    since: str
    good: Mapping[str, str]
    bad: Mapping[str, str]

    def edits(self) -> Edits:
        """The functions that differ, by their paths below the root."""
        edits = [
            Edit.of(file, change)
            for file, text in self.bad.items()
            for change in changes.changes(self.good.get(file, "").encode(), text.encode())
        ]
        return Edits(self.since, tuple(edits))


def difference(tree: Tree, good: str | None) -> Difference:
    """What differs from a good tree: all Python files, committed or not.

    ``good`` is a directory, or a commit of the user's checkout. By default it is the last commit
    that it has in common with a release, or the installed release of the same version. Raises
    ``TTraceError`` when there is no such tree.
    """
    if good is not None and Path(good).is_dir():
        return _from_folder(tree, Path(good).resolve(), good)
    if good is not None:
        if not tree.is_checkout:
            raise TTraceError(
                f"--good {good}: no such directory, and {tree.packages} is not in a git checkout"
            )
        worktrees.Checkout(tree.root).commit(good)
        return _from_commit(tree, good)
    if tree.is_checkout and (release := edited.release(tree.root)):
        return _from_commit(tree, release)
    if installed := _installed(tree):
        return _from_folder(tree, *installed)
    if tree.is_checkout and worktrees.Checkout(tree.root).is_edited():
        return _from_commit(tree, "HEAD")
    raise TTraceError(
        f"no good Megatron to compare {tree.packages} with: give a commit, a branch, or the "
        "directory of another one with --good"
    )


def _from_commit(tree: Tree, commit: str) -> Difference:
    def git(*words: str) -> str:
        return worktrees.git(tree.root, *words)

    at = git("rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}").strip()
    listed = git(*"diff --name-only -z --no-renames".split(), at, "--", "*.py")
    fresh = git(*"ls-files -z --others --exclude-standard -- *.py".split())
    names = sorted({name for name in f"{listed}{fresh}".split("\0") if name})
    before = git("ls-tree", "-r", "-z", "--name-only", at).split("\0")
    old = {name: git("show", f"{at}:{name}") for name in {*names}.intersection(before)}
    return _difference(commit, old, _texts(tree.root, names))


def _from_folder(tree: Tree, folder: Path, since: str) -> Difference:
    """``folder``: the root of a tree like the user's, or the folder that holds ``megatron/``."""
    inside = next((at for at in (tree.inside, Path()) if (folder / at / "megatron").is_dir()), None)
    if inside is None or not (folder / inside / "megatron" / "core").is_dir():
        raise TTraceError(f"{folder} has no megatron/core: give the folder that holds megatron/")
    home = folder / inside
    # A release may lack packages (megatron.legacy, tests), which nobody removed.
    parts = [path.name for path in (home / "megatron").iterdir() if path.is_dir()]
    # Scripts and what is beside them, as far as both trees have them.
    beside = {file.name for file in tree.packages.parent.glob("*.py")}
    both = sorted(name for name in beside if (home / name).is_file())

    def texts(root: Path) -> dict[str, str]:
        names = [
            path.relative_to(root).as_posix()
            for part in parts
            for path in sorted((root / "megatron" / part).rglob("*.py"))
        ]
        contents = _texts(root, [*names, *both])
        return {(tree.inside / name).as_posix(): text for name, text in contents.items()}

    return _difference(since, texts(home), texts(tree.packages.parent))


def _difference(since: str, good: Mapping[str, str], bad: Mapping[str, str]) -> Difference:
    names = [name for name in sorted({*good, *bad}) if good.get(name) != bad.get(name)]
    return Difference(
        since,
        {name: good[name] for name in names if name in good},
        {name: bad[name] for name in names if name in bad},
    )


def _texts(root: Path, names: Iterable[str]) -> dict[str, str]:
    """The content of files, decoded as git's output is."""
    return {
        name: (root / name).read_bytes().decode(errors="replace")
        for name in names
        if (root / name).is_file()
    }


def _installed(tree: Tree) -> tuple[Path, str] | None:
    """The folder and name of an installed release of the same version that is another tree."""
    if (found := edited.installed(tree.packages / "core")) is None:
        return None
    wheel, root = found
    home = (root / "megatron").resolve().parent
    if home == tree.packages.parent:
        return None
    return home, f"megatron-core {wheel.version} in {home}"


class Overlay:
    """A copy of the user's tree in which files can be exchanged."""

    def __init__(self, tree: Tree, home: Path, difference: Difference) -> None:
        """Make it as ``overlay`` in ``home``, a directory for trees alone.

        Raises ``ForeignError`` when ``home`` was not made for trees.
        """
        self._tree, self._good, self._bad = tree, difference.good, difference.bad
        owned.make(home, whole=True)
        self.root = home.resolve() / "overlay"
        owned.wipe(self.root)
        differing = {tree.root / file for file in {*self._good, *self._bad}}
        real = {tree.packages, *(folder for file in differing for folder in file.parents)}
        real |= {*tree.packages.parents, *(tree.script.parents if self.has_script else ())}
        if tree.is_checkout or self.has_script:
            owned.mirror(tree.root, self.root, lambda at: at in real or tree.packages in at.parents)
        else:
            owned.make(self.root)
            owned.mirror(tree.packages, self.root / "megatron", lambda at: True)
        self._writes = 0
        self._shown: dict[str, str | None] = {**self._bad}

    @property
    def has_script(self) -> bool:
        """Whether the training script is in the tree."""
        return self._tree.script.is_relative_to(self._tree.root)

    def show(self, splices: Iterable[Splice]) -> None:
        """Apply these hunks to the good tree, and no others."""
        texts = hunks.applied(self._good, splices)
        for file in sorted({*self._good, *self._bad}):
            text = texts.get(file, self._good.get(file))
            if text != self._shown.get(file):
                self._writes += 1
                owned.put(self.root / file, text, _EPOCH + self._writes)
                self._shown[file] = text

    def placed(self, environment: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
        """The script, and an environment in which it imports this tree's Megatron.

        ``environment`` is one in which it would import the user's.
        """
        tree, script = self._tree, self._tree.script
        path = [
            str(self._moved(Path(entry)))
            for entry in environment.get("PYTHONPATH", "").split(os.pathsep)
            if entry
        ]
        if not self.has_script or script.parent != tree.root / tree.inside:
            path.insert(0, str(self.root / tree.inside))
        return self._moved(script), {**environment, "PYTHONPATH": os.pathsep.join(path)}

    def announced(self, edits: Edits, file: Path) -> dict[str, str]:
        """What ranks need in their environment to record where these functions run."""
        files.write_atomically(file, [json.dumps(edits.to_json())])
        return {edited.GIVEN: str(file.resolve()), edited.ROOT: str(self.root)}

    def _moved(self, path: Path) -> Path:
        target = path.resolve()
        if target.is_relative_to(self._tree.root):
            return self.root / target.relative_to(self._tree.root)
        return path
