# SPDX-License-Identifier: Apache-2.0
"""What ran is recorded, in forks too, and only changes of its code reach it."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.evaluation.recipes import reached

SOURCE = """\
import os

LIMIT = 3


def used(x):
    def inner():
        return x
    return inner() + LIMIT


def unused():
    return 1


@os.fspath
def compiled():
    return 2


class Layer:
    @staticmethod
    def forward(x):
        return used(x)

    def backward(self):
        return 4
"""
FORKS = """\
import os, sys
from pathlib import Path
from megatron_ttrace.evaluation.recipes import reached

root = Path(sys.argv[1])
reached.record(root / "log", root)
sys.path.insert(0, str(root))
import layer
for _ in range(2):
    if os.fork() == 0:
        layer.Layer.forward(1)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def ran(tmp_path: Path) -> reached.Files:
    """A parent imports a module, and two forks run a method of it."""
    (tmp_path / "layer.py").write_text(SOURCE.replace("@os.fspath\n", ""))
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], check=True, timeout=600)
    assert reached.read_log(tmp_path / "log", tmp_path, ranks=3) is None
    files = reached.read_log(tmp_path / "log", tmp_path, ranks=2)
    assert files is not None
    return files


def test_what_ran(ran: reached.Files, tmp_path: Path) -> None:
    """The functions that ran, not those that were defined."""
    assert {*ran["layer.py"]} == {"", "used", "Layer.forward"}
    assert not list(reached.changed(ran, tmp_path))
    # Later runs of the recorded code are no longer known.
    assert reached.read_log(tmp_path / "absent", tmp_path, ranks=0) is None


@pytest.mark.parametrize(
    ("old", "new", "function"),
    [
        ("return x\n", "return x + 0\n", "used"),
        ("return used(x)", "return used(x + 0)", "Layer.forward"),
        ("return 1", "return 5", None),
        ("return 4", "return 5", None),
        ("LIMIT = 3", "LIMIT = 4  # more", ""),
        ("def backward(self)", "def other(self)", ""),
        ("import os\n", "# A comment.\nimport os\n\n\n", None),
    ],
)
def test_changes(ran: reached.Files, tmp_path: Path, old: str, new: str, function: str) -> None:
    """Of bodies that ran, and of all that is not in a body; comments and lines are no change."""
    file = tmp_path / "layer.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    expected = [] if function is None else [("layer.py", function)]
    assert list(reached.changed(ran, tmp_path)) == expected


def test_a_decorator_may_replace_code(tmp_path: Path) -> None:
    """What it compiles need not be seen to run: its code counts wherever the file is imported."""
    file = tmp_path / "layer.py"
    file.write_text(SOURCE)
    before = reached.digests(file)
    file.write_text(SOURCE.replace("return 2", "return 20"))
    after = reached.digests(file)
    assert {name for name in before if before[name] != after[name]} == {""}
    assert "compiled" not in before
    assert "Layer.forward" in before


def test_absent_and_broken_files(tmp_path: Path) -> None:
    """A file that is gone is a change; one that does not parse has no functions."""
    assert list(reached.changed({"a.py": {"": "x", "f": "y"}}, tmp_path)) == [
        ("a.py", ""),
        ("a.py", "f"),
    ]
    (tmp_path / "a.py").write_text("def f(:\n")
    assert [*reached.digests(tmp_path / "a.py")] == [""]


names = st.text("ab.", min_size=1, max_size=4)
files = st.dictionaries(names, st.dictionaries(names, st.text("01", max_size=3), max_size=3))


@given(jobs=st.dictionaries(names, files, max_size=2), references=st.dictionaries(names, files))
def test_records_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    jobs: dict[str, reached.Files],
    references: dict[str, reached.Files],
) -> None:
    """From a file."""
    path = tmp_path_factory.mktemp("records") / "records.json"
    records = reached.Records(
        {name: (reached.Record("tree", ran),) for name, ran in jobs.items()}, references
    )
    records.save(path)
    assert reached.Records.load(path) == records


def test_records_of_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not count, nor do those that were changed."""
    path = tmp_path / "records.json"
    reached.Records(references={"a": {"megatron/b.py": {"": "1", "f": "2"}}}).save(path)
    text = path.read_text()
    path.write_text(text.replace('"f": "2"', '"f": "3"'))
    assert reached.Records.load(path) == reached.Records()
    path.write_text(text)
    assert reached.Records.load(path) != reached.Records()
    monkeypatch.setattr(reached, "_environment", lambda: "another checker")
    assert reached.Records.load(path) == reached.Records()


def test_a_record_is_of_the_content_that_it_has(tmp_path: Path) -> None:
    """Digests of the commit's files decide, and the commit's content."""
    file = tmp_path / "megatron" / "b.py"
    file.parent.mkdir()
    file.write_text("def f():\n    return 1\n")
    ran = {"megatron/b.py": reached.digests(file)}
    records = reached.Records()
    records.keep_job("a", "tree", ran, ["tree"])
    assert records.of_job("a", "tree", tmp_path) == ran
    assert records.of_job("a", "other", tmp_path) is None
    file.write_text("def f():\n    return 2\n")
    assert records.of_job("a", "tree", tmp_path) is None
    records.keep_job("a", "new", {}, ["new"])
    assert records.jobs == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"jobs": 1}', '{"jobs": {"a": {}}}'])
def test_records_that_do_not_count(tmp_path: Path, text: str) -> None:
    """Damaged ones: everything runs."""
    (tmp_path / "records.json").write_text(text)
    assert reached.Records.load(tmp_path / "records.json") == reached.Records()
    assert reached.Records.load(tmp_path / "absent.json") == reached.Records()


def test_merged() -> None:
    """What ran in either."""
    assert reached.merged({"a": {"f": "1"}}, {"a": {"g": "2"}, "b": {"": "3"}}) == {
        "a": {"f": "1", "g": "2"},
        "b": {"": "3"},
    }
