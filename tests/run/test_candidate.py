# SPDX-License-Identifier: Apache-2.0
"""How a candidate's answer is concluded."""

import os
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ttrace.capture.batches import Served
from megatron_ttrace.jobs.settings import Keep, Settings
from megatron_ttrace.run import answer, candidate
from megatron_ttrace.run.candidate import CandidateSession
from megatron_ttrace.run.rehearsal import Block, Rehearsal
from megatron_ttrace.trace.budget import Budget
from megatron_ttrace.trace.records import Result
from megatron_ttrace.trace.store import announce
from tests.trace.traces import written


@pytest.mark.parametrize(
    ("isolate", "z_loss", "is_second", "replays"),
    [
        (False, 1e-3, False, True),
        (True, 1e-3, False, True),
        (True, 1e-3, True, False),
        (False, 0.0, False, False),
    ],
    ids=["several losses", "isolated", "a second rehearsal", "only the main loss"],
)
def test_replays_for_losses(
    monkeypatch: pytest.MonkeyPatch, isolate: bool, z_loss: float, is_second: bool, replays: bool
) -> None:
    """The losses' shares are found in an isolated check, too; not in a second rehearsal."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(answer, "answer", lambda *parts, **named: asked.update(named))
    settings = Settings(isolate=isolate)
    session = object.__new__(CandidateSession)
    first, second = SimpleNamespace(), SimpleNamespace()
    for name, value in {
        "args": SimpleNamespace(num_experts=4, moe_z_loss_coeff=z_loss),
        "settings": settings,
        "_comparison": first,
        "model": None,
        "_timings": {},
        "_notices": [],
        "_edits": None,
    }.items():
        setattr(session, name, value)
    session._answer(second if is_second else first, {}, settings)  # type: ignore[arg-type]
    assert (asked["separate"] is not None) is replays


@pytest.mark.parametrize(
    ("failed", "verdict", "saves", "asked"),
    [
        ([], Result.EQUIVALENT, False, [False]),
        ([], Result.EQUIVALENT, True, [True]),
        ([7], Result.DIVERGED, False, [True]),
        ([], Result.DIVERGED, False, [False, True]),
    ],
    ids=["healthy", "healthy and saved", "a tensor fails", "another reason"],
)
def test_code_is_only_gathered_for_places(
    monkeypatch: pytest.MonkeyPatch, failed: list[int], verdict: Result, saves: bool, asked: object
) -> None:
    """What helps to find a place is gathered, and judged with, only where there is one to find."""
    gathered, judged = [], []

    def message(lines: object, *, with_code: bool) -> str:
        gathered.append(with_code)
        return f"ledger {len(gathered)}"

    def judge(comparison: object, findings: str, settings: object) -> object:
        judged.append(findings)
        return SimpleNamespace(summary=SimpleNamespace(verdict=verdict, leaves_doubt=False))

    monkeypatch.setattr(candidate.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(candidate, "publish", lambda *_: None)
    session = object.__new__(CandidateSession)
    reference = SimpleNamespace(reference=SimpleNamespace(lines={}))
    for name, value in {
        "settings": Settings(save_candidate=saves),
        "ranks": SimpleNamespace(from_one=lambda last, task, work: work()),
        "_comparison": SimpleNamespace(reference=reference),
        "_recording": SimpleNamespace(message=message),
        "_failing": lambda comparison: frozenset(failed),
        "_findings": lambda comparison, failed, ledger: ledger,
        "_answer": judge,
    }.items():
        setattr(session, name, value)
    session._conclude(lambda comparison: None)
    assert gathered == asked
    assert judged == [f"ledger {number + 1}" for number in range(len(gathered))]


@pytest.mark.parametrize(
    ("keep", "is_loaded", "place", "elsewhere", "is_early"),
    [
        (Keep.FAILED, False, "aside", True, True),
        (Keep.FAILED, False, "aside", False, False),
        (Keep.FAILED, False, "moved", True, False),
        (Keep.ALL, False, "aside", True, False),
        (Keep.FAILED, True, "aside", True, False),
    ],
    ids=["all ranks", "not all ranks", "moved", "saved", "loaded"],
)
def test_a_reference_that_is_read_early(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep: Keep,
    is_loaded: bool,
    place: str,
    elsewhere: bool,
    is_early: bool,
) -> None:
    """By all ranks or none; neither for a start that was loaded nor where all tensors are kept."""
    monkeypatch.setattr(CandidateSession, "is_loaded", is_loaded)
    written(tmp_path / "aside", {})
    announce(tmp_path / "aside", {})
    session: Any = object.__new__(CandidateSession)
    session.settings, session.budget = Settings(keep=keep), Budget()
    session._reference = SimpleNamespace(announced=lambda: str(tmp_path / place))
    session.ranks = SimpleNamespace(
        from_one=lambda rank, task, work: work(),
        exchange=lambda task, work: [work(), elsewhere],
    )
    handles = len(os.listdir("/proc/self/fd"))
    early = session._early()
    assert (early is not None) == is_early
    assert len(os.listdir("/proc/self/fd")) - handles == int(is_early)


def test_the_step_before_has_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a step's batches is wrong in the next one, also where masks are alike."""
    iterator, seen = SimpleNamespace(iterable=iter("abc")), []
    served = Served(iterator, 2)
    rehearsal: Any = object.__new__(Rehearsal)
    rehearsal._args, rehearsal._settings = SimpleNamespace(padded_vocab_size=9), Settings()
    rehearsal.steps = lambda *, restore: nullcontext()
    rehearsal.step = lambda run: seen.extend(run())
    session: Any = object.__new__(CandidateSession)
    session.rehearsal, session.model = rehearsal, SimpleNamespace(chunks=[])
    session.ranks = SimpleNamespace(meet=lambda _: None, exchange=lambda *_: [True])
    session._warm_up(Block([1], 2, served, lambda: islice(iterator.iterable, 2)))
    assert seen == ["b", "c"]
    served.serve()
    assert [*iterator.iterable] == ["a", "b", "c"]
