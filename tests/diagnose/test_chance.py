# SPDX-License-Identifier: Apache-2.0
"""A fault that no repair describes has no cause, whatever the tensor, the job and the tolerance."""

import pytest

from megatron_ttrace.diagnose.search import search
from tests.diagnose.chance import case


def explained(numbers: range) -> tuple[int, list[str]]:
    """How many of these cases fail, and the causes that are told."""
    failing, told = 0, []
    for number in numbers:
        one = case(number)
        failing += bool(one.evidence.parts)
        told += [f"{number} {one.fault}: {found.finding}" for found in search(one.evidence)[:1]]
    return failing, told


def test_few_causes_by_chance() -> None:
    """A sample of the cases below."""
    failing, told = explained(range(80))
    assert failing > 50
    assert len(told) <= 1, told


@pytest.mark.nightly
def test_causes_by_chance() -> None:
    """Fewer than one in a hundred of all cases."""
    failing, told = explained(range(3000))
    assert failing > 2000
    assert len(told) < 0.01 * failing, told
