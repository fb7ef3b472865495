# SPDX-License-Identifier: Apache-2.0
import os

import pytest
import torch

from megatron_ttrace.trace import cleaning, owned, shared
from megatron_ttrace.trace.cleaning import Sort
from megatron_ttrace.trace.locks import Lock
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import atomic_write, seal
from tests.trace import traces


def reference(folder):
    """A reference with one tensor."""
    traces.written(folder, {TraceKey(1, 0, Kind.OUTPUT, "m", 0): torch.ones(4)})
    for name in ("overrides.json", "tolerances.jsonl", "start.0000.safetensors"):
        atomic_write(folder / name, "{}")
    seal(folder, {"fingerprint": folder.name})


@pytest.fixture
def home(tmp_path):
    """A run, a cache with an entry and an unfinished one, and somebody's own files."""
    home = tmp_path / "home"
    with shared.claim(home / "run"):
        pass
    owned.write(home / "run" / "report.html", ["<html>"])
    owned.make(home / "run" / "candidate")
    atomic_write(home / "run" / "candidate" / "rank-00000.index.jsonl", "{}")
    reference(home / "run" / "reference")
    reference(home / "cache" / "abc")
    unfinished = home / "cache" / f".def.building-{'0' * 16}"
    owned.make(unfinished)
    atomic_write(unfinished / "overrides.json", "{}")
    (home / "own").mkdir()
    (home / "own" / "meta.json").write_text("{}")
    (home / "own" / "overrides.json").write_text("{}")
    return home


def names(listed):
    return [(entry.sort, entry.path.name) for entry in listed]


def test_what_is_found(home):
    """A run with its reference, entries of a cache; not what only has the same file names."""
    assert names(cleaning.find(home)) == [
        (Sort.UNFINISHED, f".def.building-{'0' * 16}"),
        (Sort.REFERENCE, "abc"),
        (Sort.RUN, "run"),
    ]
    assert all(entry.bytes > 0 and entry.written > 0 for entry in cleaning.find(home))


def test_all_of_it_is_removed(home):
    """Nothing of ours is left, everything else is."""
    assert all(cleaning.remove(entry) for entry in cleaning.find(home))
    assert cleaning.find(home) == []
    assert sorted(path.name for path in home.iterdir()) == ["cache", "own"]
    left = {name for name in os.listdir(home / "cache") if not owned.MANIFEST.match(name)}
    assert left <= {".def.lock"}
    assert sorted(os.listdir(home / "own")) == ["meta.json", "overrides.json"]


def test_the_files_of_others_stay(home):
    """A directory with a file that no check writes stays, with that file."""
    for folder in ("run", "run/candidate", "run/reference", "cache/abc"):
        (home / folder / "notes.txt").write_text("mine")
    assert all(cleaning.remove(entry) for entry in cleaning.find(home))
    files = [path for path in home.rglob("*") if path.is_file()]
    left = {str(file.relative_to(home)) for file in files if not owned.MANIFEST.match(file.name)}
    assert left - {"cache/.def.lock"} == {
        "cache/abc/notes.txt",
        "own/meta.json",
        "own/overrides.json",
        "run/candidate/notes.txt",
        "run/notes.txt",
        "run/reference/notes.txt",
    }


def test_links_are_not_followed(home, tmp_path):
    """What a link points at is neither found nor removed; the link of a run is."""
    elsewhere = tmp_path / "elsewhere"
    reference(elsewhere / "abc")
    (home / "link").symlink_to(elsewhere, target_is_directory=True)
    with shared.claim(home / "second"):
        pass
    owned.link(home / "second" / "reference", elsewhere / "abc")
    listed = cleaning.find(home)
    assert not [entry for entry in listed if entry.path.is_relative_to(home / "link")]
    assert all(cleaning.remove(entry) for entry in listed)
    assert not (home / "second").exists()
    assert (elsewhere / "abc" / "rank-00000.0000.safetensors").exists()


def test_what_is_in_use_stays(home):
    """A run whose lock is held, and a reference that is being built."""
    locks = [Lock(home / "run" / shared.LOCK), Lock(home / "cache" / ".abc.lock")]
    assert all(lock.acquire() for lock in locks)
    try:
        kept = [entry for entry in cleaning.find(home) if not cleaning.remove(entry)]
    finally:
        for lock in locks:
            lock.release()
    assert names(kept) == [(Sort.REFERENCE, "abc"), (Sort.RUN, "run")]
    assert (home / "run" / "report.html").exists()
