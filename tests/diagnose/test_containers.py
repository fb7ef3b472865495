# SPDX-License-Identifier: Apache-2.0
"""Culprits inside containers: the module with the largest jump."""

import pytest

from megatron_ttrace.diagnose.culprits import localise
from megatron_ttrace.trace.records import Kind, Outcome
from tests.diagnose.test_culprits import verdict


@pytest.mark.parametrize(
    ("entering", "leaving", "named"),
    [
        (1.2, 300.0, "mlp.experts"),
        (100.0, 300.0, "mlp"),
        (1.2, 20.0, "mlp"),
        (0.5, 300.0, "mlp.experts"),
    ],
)
def test_the_largest_jump_within_a_container(entering, leaving, named):
    """A module inside fails by many times more than what enters it, and than the container."""
    verdicts = [
        verdict("mlp", Kind.INPUT),
        verdict(
            "mlp.experts",
            Kind.INPUT,
            Outcome.DIVERGED if entering > 1 else Outcome.PASS,
            margin=entering,
        ),
        verdict("mlp.experts", Kind.OUTPUT, Outcome.DIVERGED, margin=leaving),
        verdict("mlp", Kind.OUTPUT, Outcome.DIVERGED, margin=30.0),
    ]
    (culprit,) = localise(verdicts)
    assert culprit.name == named
    assert ("largest jump" in culprit.reason) == (named != "mlp" and entering > 1)
