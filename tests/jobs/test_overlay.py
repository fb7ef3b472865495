# SPDX-License-Identifier: Apache-2.0
"""The user's Megatron, a good one, and a copy in which hunks can be left out."""

import importlib.metadata
import os
from pathlib import Path

import pytest

from megatron_ttrace.jobs import edited, hunks, overlay
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError
from tests.jobs.processes.test_worktrees import commit, git

GOOD = {
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 7\n",
    "megatron/core/layers.py": "def f(x):\n    y = x\n    return y\n\n\ndef g(x):\n    return x\n",
    "megatron/core/old.py": "a = 1\n",
    "megatron/training/__init__.py": "",
    "tools/far.py": "b = 1\n",
    "pretrain.py": "import megatron.core\n",
}


def write(root, texts):
    """Files of a tree."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def make(root):
    """A git checkout with a release."""
    write(root, GOOD)
    (root / "megatron" / "core" / "helpers.so").write_bytes(b"\x7fELF")
    commit(root, "a release", "core_v0.19.7")
    return root


@pytest.fixture
def fork(tmp_path):
    """A fork of a release: a commit, uncommitted changes, a new file, and a removed one."""
    root = make(tmp_path / "fork")
    write(
        root, {"megatron/core/layers.py": GOOD["megatron/core/layers.py"].replace("y = x", "y = 2")}
    )
    commit(root, "a change")
    write(root, {"pretrain.py": "import megatron.core\n\nprint(1)\n"})
    write(root, {"megatron/core/new.py": "c = 1\n", "notes.txt": "no code\n"})
    (root / "megatron" / "core" / "old.py").unlink()
    return root


def test_what_differs_from_the_last_release(fork):
    """Committed or not, also the script; nothing but Python files."""
    tree = overlay.Tree.of(fork / "pretrain.py")
    assert (tree.root, tree.inside, tree.is_checkout) == (fork, Path(), True)
    difference = overlay.difference(tree, None)
    assert difference.since == "core_v0.19.7"
    changed = {"megatron/core/layers.py", "pretrain.py"}
    assert set(difference.good) == {*changed, "megatron/core/old.py"}
    assert set(difference.bad) == {*changed, "megatron/core/new.py"}
    names = [(edit.file, edit.function, edit.line) for edit in difference.edits().functions]
    assert ("megatron/core/layers.py", "f", 2) in names
    assert ("pretrain.py", "", 2) in names


def test_a_commit_and_a_directory(fork, tmp_path):
    """Each can be the good tree; what only one of them has at the top is not compared."""
    tree = overlay.Tree.of(fork / "pretrain.py")
    assert "megatron/core/layers.py" not in overlay.difference(tree, "HEAD").bad
    other = tmp_path / "other"
    write(other, {name: text for name, text in GOOD.items() if name.startswith("megatron/core")})
    difference = overlay.difference(tree, str(other))
    assert set(difference.bad) == {"megatron/core/layers.py", "megatron/core/new.py"}
    assert set(difference.good) == {"megatron/core/layers.py", "megatron/core/old.py"}


def test_the_installed_release(tmp_path, monkeypatch):
    """It is the good tree of a copy without git, if it has the same version."""
    write(tmp_path / "mine", GOOD | {"megatron/core/old.py": "a = 2\n"})
    write(tmp_path / "site", GOOD)

    class Wheel:
        version = "0.19.7"

        def locate_file(self, name):
            return tmp_path / "site" / name

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Wheel())
    tree = overlay.Tree.of(tmp_path / "mine" / "pretrain.py")
    assert not tree.is_checkout
    difference = overlay.difference(tree, None)
    assert set(difference.bad) == {"megatron/core/old.py"}
    assert difference.since.startswith("megatron-core 0.19.7 in ")
    Wheel.version = "0.19.6"
    with pytest.raises(TTraceError, match="--good"):
        overlay.difference(tree, None)


@pytest.mark.parametrize(
    ("good", "message"),
    [
        ("absent", "is not a commit of"),
        ("tools", "has no megatron/core: give the folder that holds"),
    ],
)
def test_no_good_tree(fork, monkeypatch, good, message):
    """One line that says what to do."""
    monkeypatch.chdir(fork)
    tree = overlay.Tree.of(fork / "pretrain.py")
    with pytest.raises(TTraceError, match=message) as error:
        overlay.difference(tree, good)
    assert "\n" not in str(error.value)


def test_a_copy_with_some_hunks(fork, tmp_path):
    """Any combination, the user's files untouched; each content has a time of its own."""
    before = git(fork, "status", "--porcelain")
    tree = overlay.Tree.of(fork / "pretrain.py")
    difference = overlay.difference(tree, None)
    splices = hunks.difference(difference.good, difference.bad)
    copy = overlay.Overlay(tree, tmp_path / "trees", difference)
    core = copy.root / "megatron" / "core"
    times = set()

    def shown():
        file = core / "layers.py"
        times.add(file.stat().st_mtime_ns)
        return {name: (core / name).is_file() for name in ("old.py", "new.py")}, file.read_text()

    assert shown() == ({"old.py": False, "new.py": True}, difference.bad["megatron/core/layers.py"])
    copy.show([])
    assert shown() == ({"old.py": True, "new.py": False}, GOOD["megatron/core/layers.py"])
    copy.show([splice for splice in splices if splice.file.endswith("layers.py")])
    assert shown() == ({"old.py": True, "new.py": False}, difference.bad["megatron/core/layers.py"])
    assert len(times) == 3
    assert (core / "helpers.so").resolve() == fork / "megatron" / "core" / "helpers.so"
    assert (copy.root / "tools").is_symlink()
    assert not (copy.root / ".git").exists()
    assert git(fork, "status", "--porcelain") == before
    owned.remove(tmp_path / "trees")
    assert not (tmp_path / "trees").exists()
    assert git(fork, "status", "--porcelain") == before


def test_a_copy_inside_of_the_checkout(fork):
    """The directory of a command that was started in the checkout is not copied into itself."""
    owned.make(fork / "ttrace-out-blame", ignored=True)
    tree = overlay.Tree.of(fork / "pretrain.py")
    difference = overlay.difference(tree, None)
    assert not any("ttrace" in name for name in difference.bad)
    copy = overlay.Overlay(tree, fork / "ttrace-out-blame" / "trees", difference)
    assert (copy.root / "pretrain.py").is_file()
    assert not (copy.root / "ttrace-out-blame").exists()


def test_foreign_trees_are_refused(fork, tmp_path):
    """A directory that we did not make for trees is not written to."""
    (tmp_path / "trees").mkdir()
    tree = overlay.Tree.of(fork / "pretrain.py")
    with pytest.raises(TTraceError, match="was not written by ttrace"):
        overlay.Overlay(tree, tmp_path / "trees", overlay.difference(tree, None))
    assert not any((tmp_path / "trees").iterdir())


def test_what_the_script_imports(fork, tmp_path, monkeypatch):
    """Beside the script, or found by PYTHONPATH: the copy, in its place."""
    difference = overlay.difference(tree := overlay.Tree.of(fork / "pretrain.py"), None)
    copy = overlay.Overlay(tree, tmp_path / "trees", difference)
    script, environment = copy.placed({"PYTHONPATH": f"/elsewhere:{fork}/tools"})
    assert script == copy.root / "pretrain.py"
    assert environment["PYTHONPATH"] == f"/elsewhere:{copy.root}/tools"
    (tmp_path / "mine.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(fork))
    outside = overlay.Tree.of(tmp_path / "mine.py")
    assert outside.packages == fork / "megatron"
    copy = overlay.Overlay(outside, tmp_path / "trees", difference)
    script, environment = copy.placed({"PYTHONPATH": str(fork)})
    assert script == tmp_path / "mine.py"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(copy.root)
    assert str(fork) not in environment["PYTHONPATH"].split(os.pathsep)


def test_an_installed_package_is_copied_alone(tmp_path, monkeypatch):
    """Its neighbours are where they were."""
    write(tmp_path / "site", GOOD | {"numpy/__init__.py": ""})
    write(tmp_path / "good", GOOD | {"megatron/core/old.py": "a = 2\n"})
    (tmp_path / "mine.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    tree = overlay.Tree.of(tmp_path / "mine.py")
    difference = overlay.difference(tree, str(tmp_path / "good"))
    copy = overlay.Overlay(tree, tmp_path / "trees", difference)
    assert (copy.root / "megatron" / "core" / "old.py").read_text() == "a = 1\n"
    assert not (copy.root / "numpy").exists()


def test_a_script_without_megatron(tmp_path, monkeypatch):
    """One line."""
    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(overlay.scripts, "origins", lambda path: {})
    with pytest.raises(TTraceError, match=r"would find no megatron\.core: set PYTHONPATH"):
        overlay.Tree.of(tmp_path / "mine.py")


def test_ranks_are_told_what_differs(fork, tmp_path, monkeypatch):
    """By a file, whatever git says of the copy; functions are below the copy's root."""
    tree = overlay.Tree.of(fork / "pretrain.py")
    difference = overlay.difference(tree, None)
    copy = overlay.Overlay(tree, tmp_path / "trees", difference)
    for name, value in copy.announced(difference.edits(), tmp_path / "edits.json").items():
        monkeypatch.setenv(name, value)
    assert edited.find() == difference.edits()
    assert edited.folders() == {"": f"{copy.root}/"}
