# SPDX-License-Identifier: Apache-2.0
"""What a check does beside training leaves no trace in it, and what training drew is drawn."""

import random
from types import SimpleNamespace
from typing import Any

import torch

from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore.plain import PlainState
from megatron_ttrace.run.candidate import CandidateSession
from megatron_ttrace.run.loop import Watch


def test_python_state_while_a_check_begins() -> None:
    """Importing rich, for one, draws a number: without a check, the job would have drawn it."""
    watch: Any = Watch.__new__(Watch)
    watch._settings, watch._ends_job = SimpleNamespace(role="candidate"), False
    watch._ranks = SimpleNamespace(together=lambda task, work: work())
    watch._make_session = random.random
    random.seed(5)
    watch.building()
    assert watch._session == random.random()


def test_python_state_after_a_traced_step(monkeypatch: Any) -> None:
    """Numbers that were drawn to read the step's data are not drawn again for the next one.

    What a module has counted is as before, and what it has kept.
    """
    session: Any = CandidateSession.__new__(CandidateSession)
    session.settings, session.traced = Settings(iterations=(3,)), {2: [2]}
    iterator = SimpleNamespace(iterable=iter(random.random, None))
    front = SimpleNamespace(microbatches=lambda: 2)
    monkeypatch.setattr("megatron_ttrace.mcore.fronts.current", lambda: front)
    layer: Any = torch.nn.Identity()
    layer.calls = 0
    session.rehearsal = SimpleNamespace(plain=lambda: PlainState([layer], ()))
    session._check = lambda block: (random.random(), vars(layer).update(calls=1, kept=1))
    random.seed(5)
    session.before_step(2, print, iterator)
    assert layer.calls == 0
    assert not hasattr(layer, "kept")
    after = random.random()
    random.seed(5)
    assert [random.random() for _ in range(3)][2] == after
