# SPDX-License-Identifier: Apache-2.0
"""What a restarted run records of its steps."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ttrace.jobs import edited
from megatron_ttrace.run import states
from megatron_ttrace.trace.executed import Edit, Edits

HERE = "tests/run/test_states.py"


def sampler() -> Iterator[dict[str, torch.Tensor]]:
    """Runs when the first batch is read."""
    while True:
        yield {"tokens": torch.ones(1, 4)}


def test_changes_that_ran_while_samples_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this step or an earlier one; not what did not run."""
    edits = tuple(Edit(HERE, name, 7) for name in ("sampler", "other"))
    monkeypatch.setattr(edited, "find", lambda: Edits("a release", edits))
    front = SimpleNamespace(microbatches=lambda: 1)
    monkeypatch.setattr(states.fronts, "current", lambda: front)
    monkeypatch.setattr(states.StateSession, "_held_numbers", lambda self: {})
    session: Any = object.__new__(states.StateSession)
    session._reads, session._first = set(), 0
    iterator = SimpleNamespace(iterable=sampler())
    for step in (1, 2):
        session.before_step(step, iterator)
        assert session._next(losses={}, grad_norm=None).changed == (f"{HERE}:7 (sampler)",)


def test_what_should_have_been_called() -> None:
    """A function that did not run while state was loaded is no place to look at."""
    place, ran = "megatron/schedule.py:2 (Schedule.load)", {("megatron/schedule.py", "load")}
    assert states.called(place, ran) == ""
    assert states.called(place, {*ran, ("megatron/schedule.py", "Schedule.load")}) == place
    assert states.called(place, set()) == place


class Optimizer:
    """Describes its state in one of two formats."""

    def sharded_state_dict(self) -> None:
        """Calls one of these."""

    def sharded_param_state_a(self) -> None:
        """A format."""

    def sharded_param_state_b(self) -> None:
        """Another one."""


@pytest.mark.parametrize(
    ("ran", "method"),
    [("sharded_param_state_b", "sharded_param_state_b"), ("", "sharded_state_dict")],
)
def test_the_format_of_an_optimizers_state(ran: str, method: str) -> None:
    """What described it is a place to look at, not what calls this."""
    functions = {(HERE, f"Optimizer.{ran}")}
    assert states.describing(Optimizer, functions).endswith(f"(Optimizer.{method})")
    assert states.describing(Optimizer, set()).endswith("(Optimizer.sharded_state_dict)")
