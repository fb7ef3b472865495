# SPDX-License-Identifier: Apache-2.0
"""A fault that no repair describes has no cause, whatever the tensor, the job and the tolerance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.diagnose.search import search
from tests.diagnose.chance import case
from tests.diagnose.evidence_by_hand import evidence_of, meshes


def explained(numbers: range) -> tuple[int, list[str]]:
    """How many of these cases fail, and the causes that are reported."""
    failing, causes = 0, []
    for number in numbers:
        failure = case(number)
        failing += bool(failure.evidence.parts)
        causes += [
            f"{number} {failure.fault}: {repair.finding}" for repair in search(failure.evidence)[:1]
        ]
    return failing, causes


def test_few_causes_by_chance() -> None:
    """A sample of the cases below."""
    failing, causes = explained(range(80))
    assert failing > 50
    assert len(causes) <= 1, causes


@given(st.integers(1, 5000), st.integers(0, 40), st.floats(0, 40))
def test_what_may_be_left(values: int, more: int, bits: float) -> None:
    """More with more values, less with more choices; of one value, a thousandth."""
    evidence = evidence_of(torch.ones(()), meshes(1), {0: torch.tensor(2.0)})
    share = evidence.share(values, bits)
    assert 0 < share <= 0.5
    assert evidence.share(values + more, bits) >= share
    assert evidence.share(values, bits + more) <= share
    assert evidence.share(1, bits) <= 1e-3 * 2.0**-bits
    assert evidence.share(0) < 0


@pytest.mark.parametrize("values", [2, 4, 8])
def test_how_often_a_random_error_is_so_small(values: int) -> None:
    """By simulation, with seven bits less: no more often than about the bits say."""
    generator = torch.Generator().manual_seed(values)
    errors = torch.randn((200_000, 2, values), generator=generator).norm(dim=-1)
    evidence = evidence_of(torch.ones(()), meshes(1), {0: torch.tensor(2.0)})
    left = (errors[:, 0] < evidence.share(values, -7.0) * errors[:, 1]).double().mean()
    assert float(left) < 2.0**-3


@pytest.mark.nightly
def test_causes_by_chance() -> None:
    """Fewer than one in a hundred of all cases."""
    failing, causes = explained(range(3000))
    assert failing > 2000
    assert len(causes) < 0.01 * failing, causes
