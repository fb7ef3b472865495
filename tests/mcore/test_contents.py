# SPDX-License-Identifier: Apache-2.0
"""Each version of a file is read once, and no other one's content is taken for it."""

import hashlib
from pathlib import Path

import pytest

from megatron_ttrace.mcore import contents


def test_a_version_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1")
    first = contents.content_of(file)
    with monkeypatch.context() as without:
        without.delattr(Path, "read_bytes")
        assert contents.content_of(str(file)) is first
    file.write_text("x = 22")
    second = contents.content_of(file)
    assert second is not None
    assert second.sha256 == hashlib.sha256(b"x = 22").digest()
    assert contents.content_of(tmp_path) is None
    assert contents.content_of(tmp_path / "none.py") is None


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("os.environ['A']", {"A"}),
        ('os.environ.get( "A", os.getenv("B_2"))', {"A", "B_2"}),
        ("environ.setdefault('A', '1')", {"A"}),
        ("if 'A' in os.environ or 'B' not in environ:", {"A", "B"}),
        ("environ = dict(A='1')", set()),
        ("settings['A']", set()),
    ],
)
def test_variables_that_are_read(line: str, names: set[str], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(line)
    content = contents.content_of(tmp_path / "a.py")
    assert content is not None
    assert content.variables == names


def test_packages_that_are_imported(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "import a.b as c\r\nif x:\n    from  d.e import f\n# import g\ny = 'import h'\n"
    )
    assert contents.packages_of(file) == {"a", "d"}
    assert contents.packages_of(tmp_path) == set()


def test_files_by_their_paths(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "a/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = contents.python_files(tmp_path)
    assert found == {name: str(tmp_path / name) for name in ("a/c.py", "b.py")}
    assert [*found] == ["a/c.py", "b.py"]
