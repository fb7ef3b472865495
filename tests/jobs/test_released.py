# SPDX-License-Identifier: Apache-2.0
"""What differs from a release, known from its digests alone."""

import shutil
from pathlib import Path

import pytest

from megatron_ttrace.jobs import edited, released
from megatron_ttrace.mcore import contents, versions
from megatron_ttrace.mcore.sources import megatron_folder
from megatron_ttrace.trace.executed import Edit, Edits

CORE = Path(megatron_folder()) / "core"
VERSION = versions.version_in((CORE / "package_info.py").read_text())


def test_the_installed_release():
    """All of its files are known, and none of its functions differs."""
    files = contents.python_files(CORE)
    held = {f"megatron/core/{name}": contents.content_of(path) for name, path in files.items()}
    state, others = released.nearest(held)[-1]
    name = versions.MAIN_COMMIT if VERSION == versions.MAIN else VERSION
    assert (released.states()[state], others) == (name, [])
    source = (CORE / "utils.py").read_bytes()
    assert released.edits("megatron/core/utils.py", source, state) == []


def test_a_copy_without_git(tmp_path, monkeypatch):
    """Its functions are compared, and what is outside of these; another release's differ, too."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for name in ("package_info.py", "utils.py", "parallel_state.py", "jit.py", "timers.py"):
        shutil.copy(CORE / name, core)
    monkeypatch.setattr(edited, "folders", lambda: {"megatron/core/": f"{core}/"})
    assert edited.find() == Edits()
    file = core / "utils.py"
    before = 'def divide(numerator, denominator):\n    """'
    file.write_text(file.read_text().replace(before, before + "With care. ") + "\n\nSMALL = 1\n")
    (core / "new.py").write_text("def h():\n    pass\n")
    found = edited.find()
    assert found.since == f"megatron-core {VERSION}"
    assert [(edit.file.rpartition("/")[2], edit.function) for edit in found.functions] == [
        ("new.py", "h"),
        ("new.py", ""),
        ("utils.py", "divide"),
        ("utils.py", ""),
    ]
    assert found.functions[0] == Edit("megatron/core/new.py", "h", 1)


@pytest.mark.parametrize("names", [[], ["megatron/core/own.py"]])
def test_no_release(names, tmp_path):
    """What has not half of any release's files is compared with none."""
    (tmp_path / "own.py").write_text("def h():\n    pass\n")
    held = {name: contents.content_of(tmp_path / "own.py") for name in names}
    assert released.nearest(held) == []


@pytest.fixture
def history(monkeypatch):
    """Ten states, and which of them have files and functions."""
    known = {"a": [(0, 9)], "b": [(0, 3)], "c": [(2, 9)], "d": [(7, 9)], "e": [(3, 3)]}
    monkeypatch.setattr(released, "_known", lambda: known)
    monkeypatch.setattr(released, "digest", lambda name, *_: name)
    monkeypatch.setattr(released, "states", lambda: list(map(str, range(10))))


@pytest.mark.usefixtures("history")
def test_the_nearest_states():
    """Of which most files are as they are; what another state has counts as changed."""
    held = dict.fromkeys("abcx", contents.Content(b"", frozenset()))
    assert released.nearest(held) == [(2, ["x"]), (3, ["x"])]
    assert released.nearest(held | dict.fromkeys("de", held["a"])) == [(3, ["x", "d"])]


def test_of_several_the_one_with_fewer_changes(tmp_path, monkeypatch):
    """Commits in between may only have changed a file that the user changed, too."""
    (tmp_path / "a.py").write_text("")
    edits = {1: ["f", "g"], 2: ["f"], 3: ["f", "h"]}
    monkeypatch.setattr(released, "nearest", lambda _: [(state, ["a.py"]) for state in edits])
    monkeypatch.setattr(released, "edits", lambda name, source, state: edits[state])
    monkeypatch.setattr(released, "states", lambda: ["0.19.2", "c1", "c2", "c3"])
    assert edited._since_release({"": tmp_path}, is_tracked=True) == ("c2", ["f"])


@pytest.mark.parametrize("is_tracked", [False, True])
def test_a_copy_of_a_later_commit(tmp_path, monkeypatch, is_tracked):
    """Too many files differ: without git, what no state has is known to differ."""
    monkeypatch.setattr(edited, "_MOST_FILES", 0)
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for name in ("package_info.py", "utils.py", "jit.py", "timers.py"):
        shutil.copy(CORE / name, core)
    source = (core / "utils.py").read_text()
    (core / "utils.py").write_text(f"import os\n{source}\n\ndef h():\n    pass\n")
    of_copy = edited._since_release({"megatron/core/": core}, is_tracked=is_tracked)[1]
    line = source.count("\n") + 4
    expected = [Edit("megatron/core/utils.py", "h", line)]
    assert of_copy == (None if is_tracked else expected)
