# SPDX-License-Identifier: Apache-2.0
"""Ranks agree over a key-value store; here they are threads that share one."""

import collections
import json
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.run import agreement, channel
from megatron_ttrace.run.agreement import Cause, EndError, GivenUpError, Ranks
from megatron_ttrace.trace.errors import TTraceError

pytestmark = pytest.mark.slow

SIZE = 3


class Lost:
    """A store whose server is gone."""

    def __getattr__(self, name: str) -> Any:
        def gone(*args: object) -> None:
            raise RuntimeError("connection reset by peer")

        return gone


def on_all(work: Callable[[Ranks], Any], *, timeout: float = 3600.0) -> list[Any]:
    """What each rank returned or raised; none waits for the time-out."""
    store = dist.HashStore()
    found: list[Any] = [None] * SIZE

    def run(rank: int) -> None:
        try:
            found[rank] = work(Ranks(timeout, store=store, rank=rank, size=SIZE))
        except TTraceError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive(), "a rank hangs"
    return found


def boom() -> None:
    """An unexpected error."""
    raise ValueError("one\nbad  thing")


def test_all_did() -> None:
    """Every rank keeps its own result."""
    assert on_all(lambda ranks: ranks.together("work", lambda: ranks.rank**2)) == [0, 1, 4]


def test_one_rank_works_for_all() -> None:
    """All ranks get the result of one, any JSON value."""
    found = on_all(lambda ranks: ranks.from_one(2, "work", lambda: {"of": ranks.rank}))
    assert found == [{"of": 2}] * SIZE


@pytest.mark.parametrize("sick", range(SIZE))
@pytest.mark.parametrize("where", ["before", "within", "after", "nested"])
def test_one_failed(sick: int, where: str) -> None:
    """Wherever one fails, all give up for its reason, and all later points fail too."""

    def work(ranks: Ranks) -> None:
        def parts() -> None:
            if ranks.rank == sick and where == "before":
                boom()
            ranks.together("one", boom if ranks.rank == sick and where == "within" else int)
            if ranks.rank == sick and where == "after":
                boom()
            ranks.from_one(0, "two", lambda: 1)
            if ranks.rank == sick and where == "nested":
                raise TTraceError("choose another")

        with pytest.raises(GivenUpError):
            ranks.together("all", parts)
        ranks.meet("more")

    found = on_all(work)
    assert all(isinstance(error, GivenUpError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert {error.cause.rank for error in found} == {sick}
    assert "\n" not in str(found[0])
    assert ("choose another" if where == "nested" else "ValueError: one bad thing") in str(found[0])


def test_an_interrupted_rank() -> None:
    """An interrupted rank ends, and the others do not wait for it."""

    def stop() -> None:
        raise SystemExit(3)

    def work(ranks: Ranks) -> str:
        if ranks.rank != 1:
            ranks.meet("work")
        with pytest.raises(SystemExit):
            ranks.together("work", stop)
        return "left"

    first, interrupted, last = on_all(work)
    assert interrupted == "left"
    assert isinstance(first, GivenUpError)
    assert "SystemExit: 3" in str(last)


@pytest.mark.parametrize("work", [boom, object], ids=["error", "not JSON"])
def test_the_one_that_works_fails(work: Callable[[], object]) -> None:
    """The others do not wait for its result."""
    found = on_all(lambda ranks: ranks.from_one(1, "work", work))
    assert {error.cause.rank for error in found} == {1}


def test_a_lost_rank() -> None:
    """A rank that does not arrive is named after the time-out."""

    def work(ranks: Ranks) -> None:
        if ranks.rank != 1:
            ranks.meet("work")

    found = on_all(work, timeout=0.3)
    assert found[1] is None
    assert "no answer from rank 1 within 0 s" in str(found[0])
    assert isinstance(found[2], GivenUpError)


def test_a_slow_rank_does_not_end_training() -> None:
    """It comes back after the others have given up the check and restored their state."""

    def work(ranks: Ranks) -> str:
        if ranks.rank == 1:
            time.sleep(2.0)
        try:
            ranks.meet("work")
        except GivenUpError:
            ranks.all_back()
            return "trains on"
        return "checked"

    assert on_all(work, timeout=0.3) == ["trains on"] * SIZE


def test_long_work_is_no_lost_rank() -> None:
    """A rank that sends signs of life may take longer than the time-out."""
    found = on_all(lambda ranks: ranks.from_one(0, "work", lambda: time.sleep(2.5)), timeout=2.0)
    assert found == [None] * SIZE


def test_nobody_trains_on() -> None:
    """If one rank cannot restore its state, the others learn it at the next point."""

    def work(ranks: Ranks) -> None:
        if ranks.rank == 2:
            raise ranks.end(ValueError("no memory"), "putting back")
        ranks.meet("next")

    found = on_all(work)
    assert all(isinstance(error, EndError) for error in found)
    assert len({str(error) for error in found}) == 1


def test_a_lost_store() -> None:
    """The process that held the store is gone: the job ends, with one line."""
    ranks = Ranks(30.0, store=Lost(), rank=1, size=SIZE)
    with pytest.raises(EndError, match="lost the connection"):
        ranks.meet("work")
    ranks.give_up(ValueError("x"), "work")
    ranks.farewell()


def test_one_rank() -> None:
    """A single rank needs no store."""
    ranks = Ranks(1.0)
    assert ranks.together("work", lambda: 5) == 5
    assert ranks.from_one(0, "work", lambda: 6) == 6
    ranks.all_back()
    with ranks.watching(), pytest.raises(GivenUpError, match=r"^ValueError: one bad thing$"):
        ranks.together("work", boom)
    ranks.farewell()


def test_rank_0_goes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the store while others still read from it."""
    monkeypatch.setattr(agreement, "_FAREWELL_SECONDS", 20.0)
    left: list[int] = []

    def work(ranks: Ranks) -> None:
        time.sleep(0.2 * ranks.rank)
        ranks.farewell()
        left.append(ranks.rank)

    on_all(work)
    assert left[-1] == 0 or left.index(0) >= SIZE - 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.integers(0, 9), st.text(), st.text(), st.text(), st.booleans())
def test_a_cause_travels(rank: int, host: str, task: str, why: str, of_everyone: bool) -> None:
    """A cause is received as it was announced; what follows from it is said in its first line."""
    cause = Cause(rank, host, task, why, of_everyone)
    assert Cause.of_message(json.dumps(vars(cause))) == cause
    assert cause.with_ending("!").split("\n")[0] == cause.line.split("\n")[0] + "!"


@given(json_values)
def test_what_is_not_a_cause(value: Any) -> None:
    """Any other value is refused with an ordinary error."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        Cause.of_message(json.dumps(value))


def everyones(parts: list[list[int]]) -> list[int]:
    """Merge: all numbers."""
    return sorted(number for part in parts for number in part)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 257, 4096])
def test_the_tree(size: int) -> None:
    """Every rank but the last sends once, to a rank that expects it, and nobody is left out."""
    expected = {
        source: rank
        for rank in range(size)
        for group in channel.tree(rank, size)[0]
        for source in group
    }
    assert expected == {rank: channel.tree(rank, size)[1] for rank in range(size - 1)}
    assert channel.tree(size - 1, size)[1] is None
    assert all(
        len(group) < channel.FAN_IN for rank in range(size) for group in channel.tree(rank, size)[0]
    )
    depth = 0
    at: int | None = 0
    while (at := channel.tree(at, size)[1]) is not None:
        depth += 1
    assert depth <= math.ceil(math.log(size, channel.FAN_IN))


@pytest.fixture
def mailboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages between threads in place of those of a process group."""
    boxes: dict[tuple[int, int], queue.Queue[bytes]] = collections.defaultdict(queue.Queue)
    here = threading.local()

    def joined(self: Ranks, *args: Any, **kwargs: Any) -> None:
        started(self, *args, **kwargs)
        here.rank = self.rank

    started = Ranks.__init__
    monkeypatch.setattr(Ranks, "__init__", joined)
    monkeypatch.setattr(
        channel, "send", lambda message, to, device: boxes[here.rank, to].put(message)
    )
    monkeypatch.setattr(
        channel, "receive", lambda source, device: boxes[source, here.rank].get(timeout=300)
    )


@pytest.mark.usefixtures("mailboxes")
def test_collected() -> None:
    """The last rank has what all have, merged; the others have nothing."""
    found = on_all(lambda ranks: ranks.collect("work", lambda: [ranks.rank], everyones))
    assert found == [None, None, [0, 1, 2]]


@pytest.mark.usefixtures("mailboxes")
@pytest.mark.parametrize("sick", range(SIZE))
def test_collecting_fails(sick: int) -> None:
    """All give up for one reason, wherever a part cannot be made; and where merging fails."""

    def work(ranks: Ranks) -> Any:
        make = boom if ranks.rank == sick else lambda: [ranks.rank]
        return ranks.collect("work", make, everyones)

    found = on_all(work)
    assert {error.cause.rank for error in found} == {sick}
    found = on_all(lambda ranks: ranks.collect("work", lambda: [ranks.rank], lambda parts: boom()))
    assert {error.cause.rank for error in found} == {SIZE - 1}
    assert all("ValueError" in str(error) for error in found)
