# SPDX-License-Identifier: Apache-2.0
"""Nothing that this package did not write is replaced or removed."""

import contextlib
import hashlib
import os
import stat
from pathlib import Path

import pytest

from megatron_ttrace.trace import manifests, owned, shared
from megatron_ttrace.trace.errors import TTraceError

FOREIGN = "exists and was not written by ttrace: choose another"
OUR_NAMES = shared.NAMES


def state_of(folder: Path) -> dict[str, str]:
    """Everything below a folder but what is ours: kind, permissions and content."""
    states = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        content = ""
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        states[str(path.relative_to(folder))] = f"{status.st_mode:o} {content}"
    return states


def test_what_was_written_is_replaced_and_removed(tmp_path: Path) -> None:
    """A file, a log, a link and a directory, by the process that made them or by another one."""
    home = tmp_path / "out"
    owned.make(home, ignored=True)
    owned.write(home / "a.json", ["1"])
    owned.write(home / "a.json", ["2"])
    os.close(owned.create(home / "log", owned.PRIVATE_FILE))
    (home / "log").write_text("grows")
    owned.make(home / "inner")
    owned.write(home / "inner" / "b", ["3"])
    owned.link(home / "link", home / "inner")
    manifests.tokens.clear()
    owned.link(home / "link", tmp_path)
    assert (home / "a.json").read_text() == "2"
    assert (home / ".gitignore").read_text() == "*\n"
    assert stat.S_IMODE((home / "log").stat().st_mode) == owned.PRIVATE_FILE
    for name in ("a.json", "log", "link", "inner"):
        owned.remove(home / name)
    owned.leave(home)
    assert list(tmp_path.iterdir()) == []


def foreign(path: Path, kind: str) -> None:
    """Something of that name."""
    elsewhere = path.parent / "precious"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "file").write_text("precious")
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
        (path / "meta.json").write_text('{"checksum": "0"}')
    elif kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "link to a file":
        path.symlink_to(elsewhere / "file")
    elif kind == "hard link":
        os.link(elsewhere / "file", path)
    else:
        os.mkfifo(path)


KINDS = ("file", "folder", "link", "link to a file", "hard link", "fifo")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OUR_NAMES)
def test_a_name_that_is_taken(tmp_path: Path, name: str, kind: str) -> None:
    """A run is refused in one line before it changes anything, and so is every operation."""
    foreign(tmp_path / name, kind)
    before = state_of(tmp_path)
    for take in (shared.claim, shared.require_free):
        with pytest.raises(TTraceError, match=FOREIGN) as caught:
            take(tmp_path)
        assert "\n" not in str(caught.value)
        assert str(tmp_path / name) in str(caught.value)
    assert state_of(tmp_path) == before
    for use in (
        owned.remove,
        owned.create,
        owned.append,
        lambda path: owned.write(path, ["x"]),
        lambda path: owned.link(path, tmp_path),
    ):
        with pytest.raises(TTraceError, match=FOREIGN):
            use(tmp_path / name)
    owned.discard(tmp_path / name)
    after = {path: text for path, text in state_of(tmp_path).items() if path in before}
    assert after == before


@pytest.mark.parametrize("name", [shared.LOCK, shared.RANKS])
@pytest.mark.parametrize("kind", KINDS)
def test_locks_of_others_are_not_written(tmp_path: Path, name: str, kind: str) -> None:
    """Another program's lock, or a hard link to a file, keeps its content."""
    foreign(tmp_path / name, kind)
    before = state_of(tmp_path)
    with contextlib.suppress(TTraceError):
        shared.claim(tmp_path).release()
    after = {path: text for path, text in state_of(tmp_path).items() if path in before}
    assert after == before


def test_a_file_that_was_changed(tmp_path: Path) -> None:
    """What the user edited is the user's."""
    owned.write(tmp_path / "report.html", ["ours"])
    (tmp_path / "report.html").write_text("edited")
    with pytest.raises(TTraceError, match="was changed after ttrace wrote it"):
        shared.claim(tmp_path)
    (tmp_path / "report.html").unlink()
    shared.claim(tmp_path).release()


def test_others_in_our_directories(tmp_path: Path) -> None:
    """They stay where they are, and so does the directory, which is used again."""
    home = tmp_path / "out"
    for _ in range(2):
        with shared.claim(home):
            owned.make(home / "logs", owned.PRIVATE_FOLDER)
            os.close(owned.create(home / "logs" / "rank-00000.log"))
        names = ["rank-0.foo", "x.tmp", "deep/meta.json", "rank-00001.log"]
        for name in names:
            (home / "logs" / name).parent.mkdir(exist_ok=True)
            (home / "logs" / name).write_text("mine")
    with shared.claim(home):
        left = {
            str(path.relative_to(home / "logs"))
            for path in (home / "logs").rglob("*")
            if path.is_file() and not owned.MANIFEST.match(path.name)
        }
        assert left == set(names)


def test_a_manifest_that_proves_nothing(tmp_path: Path) -> None:
    """Copied under another name, of noise, with paths, or a link: it records nothing."""
    (tmp_path / "a").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "a" / "x").write_text("mine")
    head = '{"ttrace": "%s", "made": "made"}\n["x", ""]\n["../victim", ""]\n[".", ""]'
    texts = {"1" * 16: head % ("2" * 16), "3" * 16: "[" * 99999, "4" * 16: "\0\xff", "5" * 16: ""}
    for token, text in texts.items():
        (tmp_path / "a" / f".ttrace-files-{token}").write_text(text)
    (tmp_path / "true").write_text(head % ("6" * 16))
    (tmp_path / "a" / f".ttrace-files-{'6' * 16}").symlink_to(tmp_path / "true")
    assert owned.recorded(tmp_path / "a") == set()
    assert not owned.is_ours(tmp_path / "a" / "x")
    (tmp_path / "a" / f".ttrace-files-{'7' * 16}").write_text(head % ("7" * 16))
    assert owned.recorded(tmp_path / "a") == {"x"}


def test_a_manifest_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory that everybody can write to, others cannot name what is removed."""
    owned.write(tmp_path / "a", ["1"])
    assert owned.is_ours(tmp_path / "a")
    real = os.fstat

    def of_another(handle: int) -> os.stat_result:
        status = real(handle)
        if not stat.S_ISREG(status.st_mode):
            return status
        return os.stat_result([*status[:4], status.st_uid + 1, *status[5:]])

    monkeypatch.setattr(os, "fstat", of_another)
    assert not owned.is_ours(tmp_path / "a")


def test_an_interrupted_line(tmp_path: Path) -> None:
    """A line that a full disk cut off does not spoil those after it."""
    owned.write(tmp_path / "a", ["1"])
    [manifest] = [path for path in tmp_path.iterdir() if owned.MANIFEST.match(path.name)]
    with manifest.open("a") as file:
        file.write('\n["b", "')
    owned.write(tmp_path / "c", ["1"])
    assert owned.recorded(tmp_path) == {"a", "c"}


def test_nobody_wins_a_race_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What appears between the look and the write is refused, not replaced."""
    real = manifests.Folder.place

    def late(folder: manifests.Folder, temporary: str, name: str, *, replace: bool) -> None:
        (tmp_path / name).write_text("mine")
        real(folder, temporary, name, replace=replace)

    monkeypatch.setattr(manifests.Folder, "place", late)
    with pytest.raises(TTraceError, match=FOREIGN):
        owned.write(tmp_path / "a", ["ours"])
    assert (tmp_path / "a").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".a.")] == []


def test_a_directory_for_another_program(tmp_path: Path) -> None:
    """Everything in it is ours; nothing is removed from one that existed before."""
    owned.make(tmp_path / "trees", whole=True)
    (tmp_path / "trees" / "head").mkdir()
    owned.wipe(tmp_path / "trees" / "head")
    (tmp_path / "trees" / "file").write_text("")
    owned.remove(tmp_path / "trees")
    assert not (tmp_path / "trees").exists()
    (tmp_path / "trees" / "head").mkdir(parents=True)
    owned.make(tmp_path / "trees", whole=True)
    with pytest.raises(TTraceError, match=FOREIGN):
        owned.wipe(tmp_path / "trees" / "head")


def test_an_output_that_the_user_named(tmp_path: Path) -> None:
    """It is replaced as by a shell, and a link to it stays one."""
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "page.html").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    owned.replace_named(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link", "page.html"]


def test_a_file_that_many_processes_wrote(tmp_path: Path) -> None:
    """Each recorded it with another content; one manifest is left, with the content that counts."""
    home = tmp_path / "out"
    owned.make(home)
    names = [f"file-{number}" for number in range(20)]
    for content in ("first", "second", "third"):
        manifests.tokens.clear()  # as in another process
        for name in names:
            owned.write(home / name, [content])
    with manifests.opened(home) as folder:
        folder.compact()
    for name in names:
        assert owned.is_ours(home / name)
        owned.write(home / name, ["last"])


def test_trees_are_copied_into_directories_for_trees_alone(tmp_path: Path) -> None:
    """A copy, and files in it, only where everything is ours; the source is only read."""
    source = tmp_path / "source"
    (source / "package").mkdir(parents=True)
    (source / "package" / "a.py").write_text("a = 1\n")
    (source / "far").mkdir()
    (source / "far" / "b.py").write_text("b = 0\n")
    before = state_of(source)
    home = tmp_path / "home"
    home.mkdir()
    for attempt in (
        lambda: owned.mirror(source, home / "copy", lambda path: True),
        lambda: owned.put(home / "a.py", "a = 2\n", 1),
    ):
        with pytest.raises(TTraceError, match=FOREIGN):
            attempt()
    assert not any(home.iterdir())
    owned.make(tmp_path / "trees", whole=True)
    copy = tmp_path / "trees" / "copy"
    owned.mirror(source, copy, lambda path: path.name == "package")
    assert (copy / "far").readlink() == source / "far"
    for text in ("b = 1\n", None):
        with pytest.raises(TTraceError, match=FOREIGN):
            owned.put(copy / "far" / "b.py", text, 1)
    owned.put(copy / "package" / "a.py", "a = 2\n", 1)
    assert (copy / "package" / "a.py").stat().st_mtime == 1
    owned.put(copy / "package" / "a.py", None, 2)
    assert not any((copy / "package").iterdir())
    assert state_of(source) == before
