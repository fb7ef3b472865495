# SPDX-License-Identifier: Apache-2.0
"""Ranks do not connect before rank 0 takes connections."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ttrace.cpu import collectives

LONG = 60.0
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::ffff:127.0.0.1"}
"""The second is listed with IPv6, as that of a PyTorch that listens at both."""


@pytest.fixture(params=[*LOOPBACK])
def bound(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """A socket at the port of a second rank's rank 0, which does not listen yet."""
    with socket.socket(request.param) as server:
        try:
            server.bind((LOOPBACK[request.param], 0))
        except OSError:
            pytest.skip("no such network")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        monkeypatch.setenv("RANK", "1")
        yield server


def test_a_rank_waits_for_the_store(bound: socket.socket) -> None:
    """Until somebody listens, and no longer."""
    waiting = threading.Thread(target=collectives.await_store, args=(LONG,))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    bound.listen()
    waiting.join(LONG / 2)
    assert not waiting.is_alive()


def test_patience_ends(bound: socket.socket) -> None:
    """PyTorch reports what does not come."""
    began = time.monotonic()
    collectives.await_store(0.05)
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "0"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("MASTER_PORT", ""),
        ("MASTER_PORT", "²"),
        ("_SOCKETS", ""),
    ],
)
def test_who_does_not_wait(
    bound: socket.socket, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, another machine, a launcher that says something else; without a list of sockets."""
    if name == "_SOCKETS":
        monkeypatch.setattr(collectives, name, (Path("/nowhere"),))
    else:
        monkeypatch.setenv(name, value)
    waiting = threading.Thread(target=collectives.await_store, args=(LONG,), daemon=True)
    waiting.start()
    waiting.join(LONG / 2)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    ("args", "options", "waits"),
    [
        (("nccl",), {}, True),
        ((), {"backend": "gloo", "init_method": "env://"}, True),
        (("gloo", "file:///x"), {}, False),
        ((), {"init_method": "tcp://10.0.0.1:1"}, False),
        ((), {"store": "store"}, False),
    ],
)
def test_other_stores(
    args: tuple[str, ...], options: dict[str, str], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the launcher's variables say where rank 0 is to be found."""
    awaited: list[bool] = []
    monkeypatch.setattr(collectives, "await_store", lambda: awaited.append(True))

    def init_process_group(*_: str, **__: str) -> None:
        pass

    collectives._with_gloo(init_process_group)(*args, **options)
    assert bool(awaited) == waits
