# SPDX-License-Identifier: Apache-2.0
"""Reference runs: their orders, their ranks, their errors."""

import argparse
import contextlib
import io
import json
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_ttrace.jobs.processes import ranks
from megatron_ttrace.jobs.reference_layout import Layout
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.run import launch, trial
from megatron_ttrace.run.launch import Order, Origin, Wanted
from megatron_ttrace.run.separation import Separation
from megatron_ttrace.trace import codec, ends
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.findings import Loss
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import announce, seal
from tests.trace.test_files import visible

NAME = "0123456789abcdef"
ORIGIN = Origin(("python", "train.py"), {})
KEY = TraceKey(1, 0, Kind.OUTPUT, "a")


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
    meta = ReferenceMeta(fingerprint=NAME)
    fails = pytest.raises(TTraceError, match="the reference run") if code else nullcontext()
    with fails, launch.replayed(cast(Any, None), settings, None, meta, separation) as home:
        assert home.exists()
    [(order, timeout)] = orders
    assert order.separation == separation
    assert (order.overrides, timeout) == ({"seed": 3}, 4.0)
    assert visible(tmp_path) == ["replay.log"]


@pytest.mark.parametrize("is_apart", [False, True])
def test_an_order(monkeypatch: pytest.MonkeyPatch, is_apart: bool) -> None:
    """On a CPU it is carried out at once, else when asked: for the job as it was ordered."""
    args, begun, carried_out = argparse.Namespace(num_experts=8), threading.Event(), []

    def ensure(wanted: Wanted) -> tuple[str, str]:
        begun.set()
        carried_out.append((wanted, threading.current_thread()))
        return "reference", "7"

    monkeypatch.setattr(launch, "_ensure", ensure)
    monkeypatch.setattr(launch.fingerprint, "identity", lambda *_: {})
    monkeypatch.setattr(launch, "overrides_of", lambda args: {"num_experts": args.num_experts})
    monkeypatch.setattr(launch, "is_apart", lambda _: is_apart)
    monkeypatch.setattr(sys, "argv", ["train.py", "--bf16"])
    monkeypatch.setenv("ACTIVATION", "gelu")
    found = launch.order(cast(Any, args), Settings(), None)
    assert begun.wait(10 if is_apart else 0) == is_apart
    args.num_experts = 0
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.delenv("ACTIVATION")
    assert found.complete() == ("reference", "7")
    [(wanted, thread)] = carried_out
    assert (wanted.identity, wanted.overrides) == ({}, {"num_experts": 8})
    assert wanted.experts
    assert wanted.settings.directory.is_absolute() == is_apart
    origin = wanted.origin
    assert origin.command[-3:] == ("--bf16", "--ttrace-role", "reference")
    assert origin.environment["ACTIVATION"] == "gelu"
    assert (thread is threading.main_thread()) != is_apart


def test_a_reference_that_can_be_read_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told where all tensors are while they are replayed; not of one that was found."""
    is_read = threading.Event()

    def ensure(wanted: Wanted) -> tuple[str, str]:
        if not found:
            return "found", "6"
        wanted.made.append(tmp_path)
        announce(tmp_path, {})
        assert is_read.wait(10)
        return "made", "7"

    found: list[str] = []
    monkeypatch.setattr(launch, "_ensure", ensure)
    monkeypatch.setattr(launch.fingerprint, "identity", lambda *_: {})
    monkeypatch.setattr(launch, "overrides_of", lambda _: {})
    monkeypatch.setattr(launch, "is_apart", lambda _: True)
    args = cast(Any, argparse.Namespace(num_experts=0))
    assert launch.order(args, Settings(), None).announced() == ""
    found.append("not this time")
    ordered = launch.order(args, Settings(), None)
    assert ordered.announced() == str(tmp_path)
    is_read.set()
    assert ordered.complete() == ("made", "7")
    assert ordered.announced() == ""


def test_an_order_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says why while the ranks still build their models, whose output a script may redirect."""

    def ensure(*_: object, **__: object) -> tuple[str, str]:
        while sys.stdout is out:
            time.sleep(0.01)
        raise TTraceError("the reference run was killed\nits last lines:\n  no memory")

    monkeypatch.setattr(launch, "_ensure", ensure)
    monkeypatch.setattr(launch.fingerprint, "identity", lambda *_: {})
    monkeypatch.setattr(launch, "overrides_of", lambda _: {})
    monkeypatch.setattr(launch, "is_apart", lambda _: True)
    out = sys.stdout
    found = launch.order(cast(Any, argparse.Namespace(num_experts=0)), Settings(), None)
    with (
        contextlib.redirect_stdout(io.StringIO()) as captured,
        pytest.raises(TTraceError, match="its last lines:\n  no memory"),
    ):
        found.complete()
    said = "\nttrace: the reference run was killed: the check ends as soon as the ranks need it"
    assert capsys.readouterr().out.startswith(said)
    assert not captured.getvalue()


def test_an_order_without_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is carried out when asked."""

    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(launch, "_ensure", lambda _: ("reference", "7"))
    monkeypatch.setattr(launch.fingerprint, "identity", lambda *_: {})
    monkeypatch.setattr(launch, "overrides_of", lambda _: {})
    monkeypatch.setattr(launch, "is_apart", lambda _: True)
    monkeypatch.setattr(threading.Thread, "start", start)
    found = launch.order(cast(Any, argparse.Namespace(num_experts=0)), Settings(), None)
    assert found.complete() == ("reference", "7")


def test_a_given_reference_is_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it does not fit, no models are waited for."""
    monkeypatch.setattr(launch.cpu, "active", lambda: True)
    monkeypatch.setattr(launch.forkserver, "available", lambda: True)
    assert launch.is_apart(Settings())
    assert not launch.is_apart(Settings(reference=tmp_path))


@pytest.mark.parametrize(
    ("codes", "says"), [([0, 0], ""), ([2, 1], "no room"), ([None, -9], "was killed by signal 9")]
)
def test_a_reference_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int | None], says: str
) -> None:
    """Each is told what the trial of the layout showed; the first that fails is the reason."""
    divided = ((Kind.OUTPUT, "decoder.layers.*.mlp", 0, (1, 2)),)
    orders = []

    def run(count: int, command: list[str], logs: Path, **_: object) -> ranks.Observed:
        observed = ranks.Observed(count)
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
                observed.ends.insert(0, ranks.End(rank, code, 0, log))
        seal(Path(orders[0].directory), {"fingerprint": NAME})
        assert count == 2
        return observed

    monkeypatch.setattr(ranks, "run_ranks", run)
    monkeypatch.setattr(trial, "checked", lambda layout, settings: divided)
    overrides = {"make_vocab_size_divisible_by": 512}
    layout = Layout(tp=2)
    settings = Settings(directory=tmp_path, reference_layout=layout)
    wanted = Wanted({}, overrides, experts=False, settings=settings, started=None, origin=ORIGIN)
    home = tmp_path / "building"
    fails = pytest.raises(TTraceError, match=says) if says else nullcontext()
    with fails:
        launch._make(home, NAME, wanted)
    assert (orders[0].layout, orders[0].divided) == (layout, divided)
    assert orders[0].overrides == layout.overrides(512, experts=False)
