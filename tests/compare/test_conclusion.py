# SPDX-License-Identifier: Apache-2.0
"""The one answer: it needs evidence."""

import pytest

from megatron_ttrace.compare.conclusion import _is_evidence
from megatron_ttrace.records import Kind, Outcome, Verdict


def verdict(kind: Kind, outcome: Outcome, index: int = 0) -> Verdict:
    """A verdict of which only kind and outcome matter."""
    return Verdict(1, 0, kind, "a", index, outcome, 0.0, 0.0, 1.0, 0.0, (0,), "Replicate", (1,))


@pytest.mark.parametrize(
    ("kind", "outcome", "index", "expected"),
    [
        (Kind.OUTPUT, Outcome.PASS, 0, True),
        (Kind.PARAM, Outcome.PASS, 1, True),
        (Kind.OUTPUT, Outcome.UNCHECKED, 0, False),
        (Kind.TOKENS, Outcome.PASS, 0, False),
        (Kind.PARAM, Outcome.PASS, 0, False),
    ],
)
def test_only_computed_tensors_that_pass_are_evidence(kind, outcome, index, expected) -> None:
    """A run whose computed tensors are all unchecked is not equivalent by default."""
    assert _is_evidence(verdict(kind, outcome, index)) is expected
