# SPDX-License-Identifier: Apache-2.0
"""How a candidate's answer is concluded."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.run import answer
from megatron_ttrace.run.candidate import CandidateSession


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
