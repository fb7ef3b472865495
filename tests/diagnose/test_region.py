# SPDX-License-Identifier: Apache-2.0
"""Faults of a part of a tensor."""

import dataclasses

import pytest
import torch

from megatron_ttrace.trace.findings import Cause, InPart, OtherTime
from megatron_ttrace.trace.records import Kind
from tests.diagnose.evidence_by_hand import WEIGHT, evidence_of, explain, meshes, text, values

AFTER = dataclasses.replace(WEIGHT, kind=Kind.PARAM, index=1)
BEFORE = dataclasses.replace(AFTER, index=0)


@pytest.mark.parametrize("noise", [0.0, 1e-5])
def test_each_rank_lacks_another_part_of_the_update(noise: float) -> None:
    """The parameter after a step that was not gathered, split within a row."""
    old, new = values(16, 8, seed=1), values(16, 8, seed=1) + 0.01 * values(16, 8, seed=2)

    def held(rank: int, right: torch.Tensor) -> torch.Tensor:
        own = torch.arange(128).view(16, 8) < 60
        return torch.where(own == (rank == 0), right, old) + noise * values(16, 8, seed=3 + rank)

    others = [(OtherTime(Cause.OTHER_TIME), BEFORE)]
    given = {"trace": {BEFORE: old}, "others": lambda: others}
    finding = explain(evidence_of(new, meshes(2), held, key=AFTER, **given))
    assert isinstance(finding, InPart)
    assert finding.cause is Cause.OTHER_TIME
    if not noise:
        assert finding.spans == ((0, (60, 127), 128), (1, (0, 59), 128))
    assert "holds the value from before the step; the rest is right" in text(finding, AFTER)


def test_a_part_is_scaled() -> None:
    """One piece of a buffer was not divided by the number of ranks."""
    right = values(16, 8)

    def held(_: int, right: torch.Tensor) -> torch.Tensor:
        wrong = right.clone().view(-1)
        wrong[37:101] *= 3
        return wrong.view(16, 8)

    finding = explain(evidence_of(right, meshes(3, cp=3), held))
    assert isinstance(finding, InPart)
    assert (finding.cause, finding.axes) == (Cause.TOO_LARGE, ("cp",))
    assert finding.spans[0] == (0, (37, 100), 128)


def test_scattered_faults_are_not_a_part() -> None:
    """Every third element is wrong: no run of them explains half of the error."""

    def held(_: int, right: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(128).view(16, 8) % 3 == 0, right * 0.4, right)

    assert explain(evidence_of(values(16, 8), meshes(2), held)) is None
