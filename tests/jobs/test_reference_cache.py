# SPDX-License-Identifier: Apache-2.0
"""References are built aside, renamed into place, shared, and never changed."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ttrace.jobs import reference_cache
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.locks import Lock
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, atomic_write, seal
from tests.trace.test_files import visible

NAME = "0123456789abcdef"
KEY = TraceKey(1, 0, Kind.OUTPUT, "a")
DATA = "rank-00000.0000.safetensors"


class Maker:
    """Makes a small reference of the given values, and counts how often."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self.made = 0

    def __call__(self, aside: Path) -> None:
        """Stands in for the reference run."""
        self.made += 1
        writer = TraceWriter(aside, 0)
        writer.add(Entry(KEY, (4,), "float32"), torch.full((4,), self.value))
        writer.close()
        seal(aside, {"role": "reference", "fingerprint": NAME})


def obtain(home: Path, make: Callable[[Path], None], patience: float = 5.0) -> bool:
    """Find or make; the checksum returned is that of the trace on disk."""
    checksum = reference_cache._obtain(home, NAME, make, patience)
    if checksum is not None:
        assert TraceReader(home, announced=checksum).checksum == checksum
    return checksum is not None


def value_of(home: Path) -> float:
    """The first value of the stored tensor."""
    reader = TraceReader(home)
    return float(reader.tensor(reader.entry(KEY))[0])


def test_made_once(tmp_path: Path) -> None:
    """The second time it is found; no other files are left."""
    make = Maker()
    home = tmp_path / "cache" / NAME
    assert obtain(home, make)
    before = (home / "meta.json").read_bytes()
    assert obtain(home, make)
    assert make.made == 1
    assert (home / "meta.json").read_bytes() == before
    assert visible(home.parent) == [NAME]


def test_changed_modules_that_functions_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the reference imported last is not known before the candidate imports it."""
    make = Maker()
    home = tmp_path / NAME
    obtain(home, make)
    monkeypatch.setattr(reference_cache.fingerprint, "changed", lambda modules: "late")
    assert obtain(home, make)
    assert make.made == 2
    assert (
        "cannot be used: module late, or a variable that it reads, has" in capsys.readouterr().out
    )


def test_changed_files_that_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a configuration that no option names."""
    make, home = Maker(), tmp_path / NAME
    obtain(home, make)
    monkeypatch.setattr(
        reference_cache.fingerprint, "changed_file", lambda files, absent: "conf.json"
    )
    assert obtain(home, make)
    assert make.made == 2
    assert "cannot be used: conf.json, which it has read, has changed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["meta.json", DATA, "rank-00000.index.jsonl"])
def test_a_damaged_one_is_made_again(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped bit, one line; a process that has the damaged file open keeps its content."""
    home = tmp_path / NAME
    obtain(home, Maker(1.0))
    with (home / name).open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-2, os.SEEK_END)
        file.write(bytes([byte ^ 4]))
    with (home / name).open("rb") as opened:
        damaged = opened.read()
        capsys.readouterr()
        assert obtain(home, Maker(2.0))
        opened.seek(0)
        assert opened.read() == damaged
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("ttrace: the reference made earlier cannot be used: ")
    assert name in line
    assert value_of(home) == 2.0
    assert visible(tmp_path) == [NAME]


def test_one_of_another_configuration_is_replaced(tmp_path: Path) -> None:
    home = tmp_path / "reference"
    Maker(1.0)(home)
    seal(home, {"role": "reference", "fingerprint": "another"})
    assert obtain(home, Maker(2.0))
    assert value_of(home) == 2.0
    assert visible(tmp_path) == ["reference"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A link to a cache's entry is replaced; the entry keeps its bytes and its seal."""
    entry, link = tmp_path / "cache" / "other", tmp_path / "out" / "reference"
    entry.parent.mkdir()
    Maker(1.0)(entry)
    seal(entry, {"role": "reference", "fingerprint": "other"})
    link.parent.mkdir()
    owned.link(link, entry)
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    assert obtain(link, Maker(2.0))
    assert not link.is_symlink()
    assert value_of(link) == 2.0
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == before
    for home in (entry, entry, tmp_path / "cache" / "absent"):
        reference_cache._link(link, home)
        assert link.readlink() == home.resolve()
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == before
    assert visible(link.parent) == ["reference"]


def test_somebody_elses_directory(tmp_path: Path) -> None:
    """A folder of that name that is not a reference is neither replaced nor removed."""
    home = tmp_path / "reference"
    home.mkdir()
    (home / "thesis.tex").write_text("")
    with pytest.raises(TTraceError, match="was not written by ttrace: choose another"):
        obtain(home, Maker())
    with pytest.raises(TTraceError, match="was not written by ttrace: choose another"):
        reference_cache._link(home, tmp_path / "cache")
    assert (home / "thesis.tex").exists()


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """The old reference stays, and the lock is released."""
    home = tmp_path / NAME

    def fail(aside: Path) -> None:
        owned.make(aside)
        atomic_write(aside / "overrides.json", "{}")
        raise TTraceError("the reference run failed")

    with pytest.raises(TTraceError, match="the reference run failed"):
        obtain(home, fail)
    assert visible(tmp_path) == []
    assert obtain(home, Maker())


def test_leftovers_of_killed_builds(tmp_path: Path) -> None:
    """Leftovers are removed, except those of an entry that is being built."""
    run = "1" * 16
    leftovers = [f".{NAME}.building-{run}", f".{NAME}.old-{run}", f".dead.building-{run}"]
    foreign = [f".vim.old-{run}", ".vim.old-2023", ".alive.building-2"]
    for name in [*leftovers, f".alive.building-{run}"]:
        owned.make(tmp_path / name)
        owned.write(tmp_path / name / "half", "")
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    alive = Lock(tmp_path / ".alive.lock")
    assert alive.acquire()
    obtain(tmp_path / NAME, Maker())
    assert visible(tmp_path) == sorted([f".alive.building-{run}", NAME, *foreign])
    alive.release()


def test_waiting_for_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the other process, and the wait is limited."""
    make, other = Maker(), Lock(tmp_path / f".{NAME}.lock")
    assert other.acquire()
    other.sign()
    assert not obtain(tmp_path / NAME, make, patience=0.3)
    out = capsys.readouterr().out
    assert f"waiting for the reference {NAME}, which process {os.getpid()} on " in out
    assert "making a separate copy" in out
    assert make.made == 0
    other.release()
    assert obtain(tmp_path / NAME, make)


def test_the_second_uses_what_the_first_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs need the same entry at the same time: one makes it, both use it."""
    monkeypatch.setattr(reference_cache, "_POLL_SECONDS", 0.01)
    home = tmp_path / NAME
    started, go = threading.Event(), threading.Event()
    first, second = Maker(1.0), Maker(2.0)

    def slowly(aside: Path) -> None:
        started.set()
        go.wait()
        first(aside)

    other = threading.Thread(target=obtain, args=(home, slowly))
    other.start()
    started.wait()
    threading.Timer(0.1, go.set).start()
    assert obtain(home, second)
    other.join()
    assert (first.made, second.made, value_of(home)) == (1, 0, 1.0)


def test_without_locks_the_faster_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that appeared in the meantime is verified and used."""
    home = tmp_path / NAME
    move = owned.move

    def late(path: Path, target: Path) -> None:
        if target == home and not home.exists():
            Maker(1.0)(home)
        move(path, target)

    monkeypatch.setattr(owned, "move", late)
    assert obtain(home, Maker(2.0))
    assert value_of(home) == 1.0
    assert visible(tmp_path) == [NAME]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """One line; an existing entry is still used."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TTraceError, match="cannot be written") as caught:
        obtain(tmp_path / "file" / NAME, Maker())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "mode", "says"),
    [
        ("cache", 0o700, ""),
        ("cache", 0o755, ""),
        ("cache", 0o1777, ""),
        ("cache", 0o777, "others can write to"),
        ("cache", 0o775, "others can write to"),
        (f"cache/{NAME}", 0o775, "others can write to"),
        (f"cache/{NAME}", 0o1777, "others can write to"),
        (f"cache/{NAME}/meta.json", 0o666, "others can write to"),
    ],
)
def test_a_cache_that_others_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, mode: int, says: str
) -> None:
    """Whoever can change a reference can widen its tolerances."""
    monkeypatch.delenv(reference_cache.SHARED, raising=False)
    cache = tmp_path / "cache"
    assert reference_cache.distrusted(cache, NAME) == ""
    assert obtain(cache / NAME, Maker())
    assert cache.stat().st_mode & 0o777 == 0o700
    (tmp_path / path).chmod(mode)
    why = reference_cache.distrusted(cache, NAME)
    assert says in why
    assert (str(tmp_path / path) in why) == bool(says)
    monkeypatch.setenv(reference_cache.SHARED, "1")
    assert reference_cache.distrusted(cache, NAME) == ""


def test_a_cache_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not used, unless it is root's."""
    monkeypatch.delenv(reference_cache.SHARED, raising=False)
    obtain(tmp_path / "cache" / NAME, Maker())
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    why = reference_cache.distrusted(tmp_path / "cache", NAME)
    assert ("belongs to another user" in why) == (me != 0)


def test_a_distrusted_cache_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run makes its own reference, and a notice says why."""
    monkeypatch.delenv(reference_cache.SHARED, raising=False)
    monkeypatch.setenv("TTRACE_CACHE", str(tmp_path / "cache"))
    make, home = Maker(), tmp_path / "out" / "reference"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    reference_cache.obtain(home, reference_cache.place(), NAME, make, 5.0)
    assert not home.is_symlink()
    assert "notice: the cache is not used: others can write to" in capsys.readouterr().out
    (tmp_path / "cache").chmod(0o700)
    reference_cache.obtain(home, reference_cache.place(), NAME, make, 5.0)
    assert home.is_symlink()
    assert make.made == 2
