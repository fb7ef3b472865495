# SPDX-License-Identifier: Apache-2.0
"""References are built aside, renamed into place, shared, and never changed."""

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megatron_ttrace.jobs.processes import ranks
from megatron_ttrace.jobs.reference_layout import Layout
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.run import launch, trial
from megatron_ttrace.run.launch import Order
from megatron_ttrace.run.separation import Separation
from megatron_ttrace.trace import codec, ends, owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.findings import Loss
from megatron_ttrace.trace.locks import Lock
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, atomic_write, seal

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
    checksum = launch._obtain(home, NAME, make, patience)
    if checksum is not None:
        assert TraceReader(home, announced=checksum).checksum == checksum
    return checksum is not None


def value_of(home: Path) -> float:
    """The first value of the stored tensor."""
    reader = TraceReader(home)
    return float(reader.tensor(reader.entry(KEY))[0])


def visible(folder: Path) -> list[str]:
    """The content of a folder, without locks and manifests."""
    others = re.compile(rf".*\.lock|{owned.MANIFEST.pattern}|{owned.IGNORE}")
    return sorted(p.name for p in folder.iterdir() if not others.fullmatch(p.name))


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
    with (home / name).open("rb") as held:
        damaged = held.read()
        capsys.readouterr()
        assert obtain(home, Maker(2.0))
        held.seek(0)
        assert held.read() == damaged
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("ttrace: the reference made earlier cannot be used: ")
    assert name in line
    assert value_of(home) == 2.0
    assert visible(tmp_path) == [NAME]


def test_one_of_another_configuration_is_replaced(tmp_path: Path) -> None:
    """A reference of another configuration is replaced."""
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
        launch._link(link, home)
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
        launch._link(home, tmp_path / "cache")
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
    left = [f".{NAME}.building-{run}", f".{NAME}.old-{run}", f".dead.building-{run}"]
    foreign = [f".vim.old-{run}", ".vim.old-2023", ".alive.building-2"]
    for name in [*left, f".alive.building-{run}"]:
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


@contextlib.contextmanager
def building(lock: Path) -> Iterator[int]:
    """Another process that holds an entry's lock."""
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        other = Lock(lock)
        other.acquire()
        other.sign()
        os.write(told, b"1")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def test_waiting_for_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the other process, and the wait is limited."""
    make = Maker()
    with building(tmp_path / f".{NAME}.lock") as other:
        assert not obtain(tmp_path / NAME, make, patience=0.3)
        said = capsys.readouterr().out
        assert f"waiting for the reference {NAME}, which process {other} on " in said
        assert "making a separate copy" in said
        assert make.made == 0
    assert obtain(tmp_path / NAME, make)


def test_the_second_uses_what_the_first_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs need the same entry at the same time: one makes it, both use it."""
    monkeypatch.setattr(launch, "_POLL_SECONDS", 0.01)
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

    def slowly(aside: Path) -> None:
        Maker(2.0)(aside)

    move = owned.move

    def late(path: Path, target: Path) -> None:
        if target == home and not home.exists():
            Maker(1.0)(home)
        move(path, target)

    monkeypatch.setattr(owned, "move", late)
    assert obtain(home, slowly)
    assert value_of(home) == 1.0
    assert visible(tmp_path) == [NAME]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """One line; an existing entry is still used."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TTraceError, match="cannot be written") as caught:
        obtain(tmp_path / "file" / NAME, Maker())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", [0, 1])
def test_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """It is told what to find, and given half of the patience; nothing of it is left."""
    separation = Separation(
        reference="reference", checksum="7", keys=(KEY,), losses=(Loss.Z,), isolated=False
    )
    orders = []

    def run(command: list[str], environment: object, log: Path, timeout: float) -> int:
        orders.append((Order.read(Path(command[-1])), timeout))
        log.write_text("")
        seal(Path(orders[0][0].directory), {})
        return code

    monkeypatch.setattr(launch, "run_subprocess", run)
    monkeypatch.setattr(launch, "overrides_of", lambda args: {"seed": 3})
    monkeypatch.delenv("TTRACE_FORKSERVER", raising=False)
    settings = Settings(directory=tmp_path, timeout=8.0)
    meta = {"fingerprint": NAME, "identity": {}}
    fails = pytest.raises(TTraceError, match="the reference run") if code else nullcontext()
    with fails, launch.replayed(cast(Any, None), settings, None, meta, separation) as home:
        assert home.exists()
    [(order, timeout)] = orders
    assert order.separation == separation
    assert (order.overrides, timeout) == ({"seed": 3}, 4.0)
    assert visible(tmp_path) == ["replay.log"]


@pytest.mark.parametrize(
    ("codes", "says"), [([0, 0], ""), ([2, 1], "no room"), ([None, -9], "was killed by signal 9")]
)
def test_a_reference_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int | None], says: str
) -> None:
    """Each is told what the trial of the layout showed; the first that fails is the reason."""
    divided = ((Kind.OUTPUT, "decoder.layers.*.mlp", 0, (1, 2)),)
    orders = []

    def run(
        count: int, command: list[str], logs: Path, *, observed: ranks.Observed, **_: object
    ) -> list[int | None]:
        orders.append(Order.read(Path(command[-1])))
        logs.mkdir(exist_ok=True)
        for rank, code in enumerate(codes):
            log = ranks.log_of(logs, rank)
            log.write_text("ttrace: tracing")
            record = ends.EndRecord(
                code=code or 0,
                at=1 - rank,
                message="no room" if code == 2 else "lost another rank",
                follows=code != 2,
            )
            ends.file_of(log).write_text(json.dumps(codec.encode(record)))
            if code:
                observed.ends.insert(0, ranks.End(rank, code, 0))
        seal(Path(orders[0].directory), {"fingerprint": NAME})
        assert count == 2
        return codes

    monkeypatch.setattr(ranks, "run_ranks", run)
    monkeypatch.setattr(trial, "checked", lambda layout, settings: divided)
    overrides = {"make_vocab_size_divisible_by": 512}
    monkeypatch.setattr(launch, "overrides_of", lambda args: overrides)
    layout = Layout(tp=2)
    settings = Settings(directory=tmp_path, reference_layout=layout)
    home = tmp_path / "building"
    fails = pytest.raises(TTraceError, match=says) if says else nullcontext()
    with fails:
        launch._make(home, NAME, {}, cast(Any, None), settings, None)
    assert (orders[0].layout, orders[0].divided) == (layout, divided)
    assert orders[0].overrides == layout.overrides(512)


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
    monkeypatch.delenv(launch.SHARED, raising=False)
    cache = tmp_path / "cache"
    assert launch.distrusted(cache, NAME) == ""
    assert obtain(cache / NAME, Maker())
    assert cache.stat().st_mode & 0o777 == 0o700
    (tmp_path / path).chmod(mode)
    why = launch.distrusted(cache, NAME)
    assert says in why
    assert (str(tmp_path / path) in why) == bool(says)
    monkeypatch.setenv(launch.SHARED, "1")
    assert launch.distrusted(cache, NAME) == ""


def test_a_cache_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not used, unless it is root's."""
    monkeypatch.delenv(launch.SHARED, raising=False)
    obtain(tmp_path / "cache" / NAME, Maker())
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    why = launch.distrusted(tmp_path / "cache", NAME)
    assert ("belongs to another user" in why) == (me != 0)


def test_a_distrusted_cache_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run makes its own reference, and a notice says why."""
    monkeypatch.delenv(launch.SHARED, raising=False)
    monkeypatch.setenv("TTRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch.fingerprint, "identity", lambda args, settings: {})
    monkeypatch.setattr(launch.fingerprint, "digest", lambda wanted: NAME)
    make = Maker()
    monkeypatch.setattr(launch, "_make", lambda aside, *_: make(aside))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    settings = Settings(directory=tmp_path / "out")
    home, _ = launch.ensure(cast(Any, None), settings, None)
    assert not Path(home).is_symlink()
    assert "notice: the cache is not used: others can write to" in capsys.readouterr().out
    (tmp_path / "cache").chmod(0o700)
    home, _ = launch.ensure(cast(Any, None), settings, None)
    assert Path(home).is_symlink()
    assert make.made == 2
