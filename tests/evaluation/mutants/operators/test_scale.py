# SPDX-License-Identifier: Apache-2.0
"""Scales lost and doubled."""

import pytest

from megatron_ttrace.evaluation.mutants.operators import double_scale, lost_scale
from tests.evaluation.mutants.changes import changes


@pytest.mark.parametrize(
    ("body", "lost", "doubled"),
    [
        ("y = x / world_size", ["y = (x)"], ["y = ((x / world_size) / (world_size))"]),
        ("y = x * loss_scale", ["y = (x)"], ["y = ((x * loss_scale) * (loss_scale))"]),
        ("y = coeff * x", ["y = (x)"], ["y = ((coeff * x) * (coeff))"]),
        ("x *= factor", ["pass"], ["x *= (factor) * (factor)"]),
        ("x /= num_microbatches", ["pass"], ["x /= (num_microbatches) * (num_microbatches)"]),
        ("g.mul_(s)", ["(g)"], ["g.mul_(s).mul_(s)"]),
        # Not scales: numbers of elements, and a constant.
        ("n = rows * size", [], []),
        ("n = rows // world_size", [], []),
        ("g.mul_(2)", [], []),
    ],
)
def test_changes(body, lost, doubled):
    assert changes(lost_scale, body) == lost
    assert changes(double_scale, body) == doubled
