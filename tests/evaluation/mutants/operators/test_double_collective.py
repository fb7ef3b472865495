# SPDX-License-Identifier: Apache-2.0
"""Collectives done twice."""

import pytest

from megatron_ttrace.evaluation.mutants.operators import double_collective
from tests.evaluation.mutants.changes import changes


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        ("dist.all_reduce(x)", ["(dist.all_reduce(x), dist.all_reduce(x))[1]"]),
        (
            "h = dist.all_reduce(x, async_op=True)",
            [
                "h = (dist.all_reduce(x, async_op=True).wait(), "
                "dist.all_reduce(x, async_op=True))[1]"
            ],
        ),
        ("y = _reduce(x, g)", ["y = _reduce(_reduce(x, g), g)"]),
        (
            "y = reduce_from_tensor_model_parallel_region(x, group=g)",
            [
                "y = reduce_from_tensor_model_parallel_region("
                "reduce_from_tensor_model_parallel_region(x, group=g), group=g)"
            ],
        ),
        # Doing these twice changes nothing.
        ("dist.all_gather(parts, x)", []),
        ("dist.broadcast(x, src=0)", []),
    ],
)
def test_changes(body, becomes):
    assert changes(double_collective, body) == becomes
