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
FILE = "megatron/core/layers.py"


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
    (tree / "megatron" / "core" / "new.py").write_text("def h():\n    pass\n")
    assert edited.find() == Edits(
        "core_v0.19.0",
        (Edit(FILE, "f", 2), Edit(FILE, "g", 6), Edit("megatron/core/new.py", "h", 1)),
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
    """A fork that is far from its release is compared with HEAD."""
    commit(tree, "a release", "core_v0.19.0")
    for number in range(3):
        (tree / "megatron" / "core" / f"new{number}.py").write_text("x = 1\n")
    commit(tree, "much")
    (tree / FILE).write_text(CODE.replace("return 1", "return 3"))
    monkeypatch.setattr(edited, "_MOST_FILES", 2)
    assert [edit.function for edit in edited.find().functions] == ["f"]
    assert edited.find().since == git(tree, "rev-parse", "--short=12", "HEAD")


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


def test_a_wheel(tree, monkeypatch):
    """Files that are not what was installed."""
    info = tree / "megatron_core-0.19.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.2\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(CODE.encode()).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"{FILE},sha256={digest},{len(CODE)}\n{info.name}/RECORD,,\n")
    monkeypatch.syspath_prepend(str(tree))
    assert edited.find() == Edits()
    (tree / FILE).write_text(CODE + "x = 1\n")
    assert edited.find() == Edits("megatron-core 0.19.2", (Edit(FILE, "", 1, is_whole=True),))


def test_nothing_is_known(tree, monkeypatch):
    """Neither git nor a wheel knows these files; an error is no change."""
    assert edited.find() == Edits()
    monkeypatch.setattr(edited, "folders", lambda: 1 / 0)
    assert edited.find() == Edits()
