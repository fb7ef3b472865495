# SPDX-License-Identifier: Apache-2.0
"""Other reductions."""

import pytest

from megatron_ttrace.evaluation.mutants.operators import wrong_op
from tests.evaluation.mutants.changes import changes

AVERAGE = '__import__("torch").distributed.ReduceOp.AVG'


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        ("op = torch.distributed.ReduceOp.SUM", ["op = torch.distributed.ReduceOp.AVG"]),
        ("op = ReduceOp.AVG", ["op = ReduceOp.SUM"]),
        ("dist.all_reduce(x, op=dist.ReduceOp.MAX)", ["dist.all_reduce(x, op=dist.ReduceOp.SUM)"]),
        ("dist.all_reduce(x, group=g)", [f"dist.all_reduce(x, group=g, op={AVERAGE})"]),
        ("dist.all_reduce(\n    x,\n)", [f"dist.all_reduce(\n    x, op={AVERAGE})"]),
        ("dist.all_gather(parts, x)", []),
        ("y = _reduce(x)", []),
    ],
)
def test_changes(body, becomes):
    assert changes(wrong_op, body) == becomes
