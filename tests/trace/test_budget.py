# SPDX-License-Identifier: Apache-2.0
import collections
import mmap
import types

import psutil
import pytest
import torch

from megatron_ttrace.trace import budget as limits
from megatron_ttrace.trace.budget import Budget, host_room, shown
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal
from tests.bench.memory import Peak


def key(number):
    return TraceKey(1, 0, Kind.OUTPUT, f"m{number}", 0)


def test_the_parts_fit_into_the_whole():
    """What is copied while it is written counts twice."""
    budget = Budget(64 << 20)
    assert 2 * budget.unwritten + budget.mapped + budget.staged + budget.kept <= budget.total


@pytest.mark.parametrize(
    ("most", "room"), [("max\n", 125_000), ("500000\n", 50_000), ("90000\n", 0), (None, 125_000)]
)
def test_a_host_has_room_for_half_of_what_is_free(tmp_path, monkeypatch, most, room):
    """In a container no more than its limit leaves; divided among the ranks."""
    free = collections.namedtuple("Free", "available")(1_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(limits, "_CONTAINER", tmp_path)
    if most is not None:
        (tmp_path / "memory.max").write_text(most)
        (tmp_path / "memory.current").write_text("100000\n")
    assert host_room(4) == room


@pytest.mark.parametrize(
    ("size", "text"),
    [(12, "12 bytes"), (1500, "1.5 kB"), (700_000_000, "700 MB"), (2_000_000_000_000, "2.0 TB")],
)
def test_sizes(size, text):
    assert shown(size) == text


def test_pages_that_were_read_are_given_back(tmp_path):
    """Reading a trace that is larger than the budget does not make the process grow by it."""
    step = 4 << 20
    writer = TraceWriter(tmp_path, 0, Budget(8 * step))
    for number in range(24):
        data = torch.full((step // 4,), float(number))
        writer.add(Entry.of(key(number), data), data)
    writer.close()
    seal(tmp_path, {})
    resident = {}
    for total in (16 * step, 1 << 40):
        reader = TraceReader(tmp_path, budget=Budget(total))
        with Peak() as before:
            pass
        with Peak() as peak:
            assert [int(reader.tensor(reader.entry(key(n))).sum()) for n in range(24)] == [
                n * step // 4 for n in range(24)
            ]
        resident[total] = peak.resident - before.resident
        del reader
    assert resident[1 << 40] > 23 * step
    assert resident[16 * step] < 8 * step + mmap.PAGESIZE


def test_heaps_are_trimmed_where_they_can_be(monkeypatch):
    """With glibc, once; another C library has no such function."""
    asked = []
    library = types.SimpleNamespace(malloc_trim=asked.append)
    monkeypatch.setattr(limits.ctypes, "CDLL", lambda _: library)
    limits.give_back()
    del library.malloc_trim
    limits.give_back()
    assert asked == [0]
