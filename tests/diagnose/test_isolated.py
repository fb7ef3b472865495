# SPDX-License-Identifier: Apache-2.0
"""Culprits of isolated runs, in which no error is the consequence of another."""

from megatron_ttrace.trace.records import Direction, Kind, Outcome
from tests.diagnose.judged_by_hand import localise
from tests.diagnose.test_culprits import verdict


def test_isolated_a_missing_module_is_a_matter_of_forward():
    """As without isolation, though it is a parameter that tells."""
    missing = verdict("decoder.layers.1.mlp.linear_fc1.weight", Kind.PARAM, Outcome.MISSING)
    for isolated in (False, True):
        (culprit,) = localise([missing], isolated=isolated)
        assert (culprit.name, culprit.direction) == (
            "decoder.layers.1.mlp.linear_fc1",
            Direction.FORWARD,
        )


def test_the_norm_of_what_is_left_is_no_culprit():
    """A parameter that the optimizer does not know is missing in the norm of all gradients."""
    unknown = verdict("decoder.layers.1.mlp.experts.w", Kind.EXP_AVG, Outcome.MISSING)
    norm = verdict("grad_norm", Kind.GRAD_NORM, Outcome.DIVERGED, margin=9.0)
    alone = [culprit.name for culprit in localise([norm], isolated=True)]
    assert alone == ["grad_norm"]
    both = [culprit.name for culprit in localise([norm, unknown], isolated=True)]
    assert both == ["decoder.layers.1.mlp.experts.w"]
