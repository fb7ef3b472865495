# SPDX-License-Identifier: Apache-2.0
"""``ttrace resume``: the order of its runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ttrace.jobs import restarts as plans
from megatron_ttrace.saved import restarts
from megatron_ttrace.saved.recorded import Recorded
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import LoadedIndex
from megatron_ttrace.trace.resumed import What
from tests.saved import recordings

OTHER, ALIKE = "--tensor-model-parallel-size 1", "--pipeline-model-parallel-size 2"


class Stored:
    """A checkpoint in which the weight is right, or zero."""

    def __init__(self, *, right: bool) -> None:
        self.numbers: dict[str, object] = {}
        self._right = right

    def read(self, kind: What, _: str) -> torch.Tensor | None:
        weight = recordings.state()[LoadedIndex.WEIGHT]
        return weight * self._right if kind is What.WEIGHT else None

    def also_from(self, restarted: Recorded) -> None:
        """All of it is known."""


@pytest.mark.parametrize(
    ("right", "into", "nproc", "refused", "verdicts"),
    [
        (True, (), 2, "", ["equivalent"]),
        (False, (), 2, "", ["equivalent", "diverged"]),
        (False, (), 2, "--nproc", ["equivalent", "could not check"]),
        (False, (), 1, "", ["equivalent", "could not check"]),
        # Another layout decides, unless it reads the same, or Megatron refuses it.
        (False, (OTHER,), 2, "", ["equivalent", "diverged"]),
        (False, (ALIKE,), 2, "", ["equivalent", "equivalent", "diverged"]),
        (False, (OTHER,), 2, OTHER, ["equivalent", "could not check", "diverged"]),
    ],
)
def test_a_checkpoint_that_is_right_for_one_layout(
    tmp_path: Path,
    right: bool,
    into: tuple[str, ...],
    nproc: int,
    refused: str,
    verdicts: list[str],
) -> None:
    """It goes on in that one; another one decides."""
    wrong = recordings.state() | {LoadedIndex.WEIGHT: torch.zeros(4, dtype=torch.bfloat16)}

    class Runner:
        def record(self, run: plans.Run) -> Recorded:
            if refused and run.layout.startswith(refused):
                raise TTraceError("refused")
            loaded = {"loaded": wrong} if run.layout not in ("", ALIKE) else {}
            return recordings.restarted(tmp_path / run.name, **loaded)  # type: ignore[arg-type]

        def say(self, line: str) -> None:
            """Nothing is printed."""

    plan = plans.plan(["--train-iters", "9"], nproc, 2, into, tmp_path)
    before = recordings.uninterrupted(tmp_path / "before")
    runner: Any = Runner()
    stored: Any = Stored(right=right)
    answers = restarts._answers(plan, runner, before, stored)
    assert [answer.verdict for answer in answers] == verdicts
