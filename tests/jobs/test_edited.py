# SPDX-License-Identifier: Apache-2.0
"""What differs from a release, from HEAD, or from an installed wheel."""

import base64
import hashlib
import sys
import types

import pytest

from megatron_ttrace.jobs import edited
from megatron_ttrace.trace.executed import Edit, Edits
from tests.jobs.processes.test_worktrees import commit, git

CODE = "def f():\n    return 1\n\n\ndef g():\n    return 2\n"
FILE, NEW = "megatron/core/layers.py", "megatron/core/new.py"
VERSION = "megatron/core/package_info.py"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A package that is taken for Megatron's."""
    folder = tmp_path / "megatron" / "core"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "layers.py").write_text(CODE)
    monkeypatch.setattr(edited, "folders", lambda: {"megatron/core/": f"{folder}/"})
    return tmp_path


def test_a_checkout(tree):
    """Since the last release, with what is not committed and files that git does not know."""
    commit(tree, "a release")
    assert edited.find() == Edits()
    (tree / FILE).write_text(CODE.replace("return 1", "return 3"))
    head = git(tree, "rev-parse", "--short=12", "HEAD")
    assert edited.find() == Edits(head, (Edit(FILE, "f", 2),))
    git(tree, "tag", "core_v0.19.0")
    git(tree, "commit", "-q", "-a", "-m", "a change")
    (tree / FILE).write_text((tree / FILE).read_text().replace("return 2", "return 4"))
    (tree / NEW).write_text("def h():\n    pass\n")
    assert edited.find() == Edits(
        "core_v0.19.0",
        (Edit(FILE, "f", 2), Edit(FILE, "g", 6), Edit(NEW, "h", 1)),
    )


def test_a_fork_of_the_main_branch(tree):
    """It is compared with where the last release's branch began, not with an older release."""
    commit(tree, "an older release", "core_v0.18.0")
    commit(tree, "the branch begins here")
    begin = git(tree, "rev-parse", "HEAD")
    git(tree, "switch", "-q", "-c", "release")
    commit(tree, "a release", "core_v0.19.0")
    assert edited.release(tree) == "core_v0.19.0"
    git(tree, "switch", "-q", "-")
    commit(tree, "a change")
    assert edited.release(tree) == begin[:12]


def test_more_than_anybody_reads(tree, monkeypatch):
    """A fork that is far from its release is compared with its remote's branch, or with HEAD."""
    commit(tree, "a release", "core_v0.19.0")
    for number in range(3):
        (tree / "megatron" / "core" / f"new{number}.py").write_text("x = 1\n")
    commit(tree, "much")
    (tree / FILE).write_text(CODE.replace("return 1", "return 3"))
    monkeypatch.setattr(edited, "_MOST_FILES", 2)
    assert [edit.function for edit in edited.find().functions] == ["f"]
    head = git(tree, "rev-parse", "--short=12", "HEAD")
    assert edited.find().since == head
    git(tree, "update-ref", "refs/remotes/origin/HEAD", head)
    commit(tree, "a change")
    assert edited.find() == Edits(head, (Edit(FILE, "f", 2),))


def test_the_script(tree, monkeypatch):
    """It is listed with the modules beside it, if Megatron is there too; other folders are not."""
    monkeypatch.undo()
    core = types.SimpleNamespace(__file__=f"{tree}/megatron/core/__init__.py")
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.delitem(sys.modules, "megatron.training", raising=False)
    for name in ("train.py", "beside.py", "tools/far.py"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(CODE)
    commit(tree, "a release", "core_v0.19.0")
    main = types.ModuleType("__main__")
    exec(compile(CODE, f"{tree}/train.py", "exec"), vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert [*edited.folders()] == ["megatron/core/", ""]
    for name in ("train.py", "beside.py", "tools/far.py", FILE):
        (tree / name).write_text(CODE.replace("return 1", "return 3"))
    assert edited.find() == Edits(
        "core_v0.19.0", (Edit(FILE, "f", 2), Edit("beside.py", "f", 2), Edit("train.py", "f", 2))
    )
    exec(compile(CODE, "train.py", "exec"), vars(main))
    assert [*edited.folders()] == ["megatron/core/"]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """An installed release."""
    root = tmp_path / "installed"
    info = root / "megatron_core-0.19.3.dist-info"
    contents = {FILE: CODE, VERSION: "MAJOR = 0\nMINOR = 19\nPATCH = 3\n"}
    record = [f"{info.name}/RECORD,,\n"]
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{name},sha256={digest.decode()},{len(text)}\n")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.3\n")
    (info / "RECORD").write_text("".join(record))
    monkeypatch.syspath_prepend(str(root))
    return root


def test_a_wheel(wheel, monkeypatch):
    """Files that are not what was installed."""
    monkeypatch.setattr(edited, "folders", lambda: {"megatron/core/": f"{wheel}/megatron/core/"})
    assert edited.find() == Edits()
    (wheel / FILE).write_text(CODE + "x = 1\n")
    (wheel / NEW).write_text("def h():\n    pass\n")
    assert edited.find() == Edits("megatron-core 0.19.3", (Edit(FILE, "", 0), Edit(NEW, "h", 1)))


def test_a_copy_of_a_wheel(tree, wheel):
    """It is compared with the wheel, as is a checkout without releases; not with another one."""
    (tree / VERSION).write_text((wheel / VERSION).read_text())
    (tree / "megatron" / "core" / "__init__.py").unlink()
    assert edited.find() == Edits()
    (tree / FILE).write_text(CODE.replace("return 2", "return 4"))
    (tree / NEW).write_text("def h():\n    pass\n")
    changed = Edits("megatron-core 0.19.3", (Edit(FILE, "g", 6), Edit(NEW, "h", 1)))
    assert edited.find() == changed
    commit(tree, "a fork's")
    assert edited.find() == changed
    (tree / VERSION).write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    assert edited.find().since == git(tree, "rev-parse", "--short=12", "HEAD")


def test_nothing_is_known(tree, monkeypatch):
    """Neither git nor a wheel knows these files; an error is no change."""
    assert edited.find() == Edits()
    replaced = Edit("plugin.py", "f", 3, replaces=True)
    assert edited.find([replaced]) == Edits("", (replaced,))
    monkeypatch.setattr(edited, "folders", lambda: 1 / 0)
    assert edited.find() == Edits()
