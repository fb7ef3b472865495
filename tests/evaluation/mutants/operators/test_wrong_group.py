# SPDX-License-Identifier: Apache-2.0
"""Collectives over another axis."""

import pytest

from megatron_ttrace.evaluation.mutants.operators import wrong_group as operator
from megatron_ttrace.evaluation.mutants.operators.wrong_group import DATA, TENSOR
from tests.evaluation.mutants.changes import changes

LAYERS = "megatron.core.tensor_parallel.layers"
BUFFER = "megatron.core.distributed.param_and_grad_buffer"


@pytest.mark.parametrize(
    ("module", "body", "becomes"),
    [
        (LAYERS, "dist.all_reduce(x, group=tp_group)", [f"dist.all_reduce(x, group={DATA})"]),
        (LAYERS, "dist.all_reduce(x, group=group)", [f"dist.all_reduce(x, group={DATA})"]),
        (BUFFER, "dist.all_reduce(x, group=group)", [f"dist.all_reduce(x, group={TENSOR})"]),
        (
            BUFFER,
            "dist.all_reduce(x, group=self.dp_cp_group)",
            [f"dist.all_reduce(x, group={TENSOR})"],
        ),
        (LAYERS, "y = _reduce(x, get_tensor_model_parallel_group())", [f"y = _reduce(x, {DATA})"]),
        (LAYERS, "y = all_to_all(self.ep_group, x)", [f"y = all_to_all({TENSOR}, x)"]),
        (LAYERS, "dist.all_reduce(x)", []),
        (LAYERS, "f(group=tp_group)", []),
    ],
)
def test_changes(module, body, becomes):
    assert changes(operator, body, module) == becomes
