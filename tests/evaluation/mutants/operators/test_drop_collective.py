# SPDX-License-Identifier: Apache-2.0
"""Collectives dropped."""

import pytest

from megatron_ttrace.evaluation.mutants.operators import drop_collective
from tests.evaluation.mutants.changes import changes


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        ("torch.distributed.all_reduce(x, group=g)", ["None"]),
        ("dist.broadcast(x, src=0)", ["None"]),
        ("bucket_group.start_grad_sync()", ["None"]),
        ("_allreduce_word_embedding_grads(model, config)", ["None"]),
        ("y = reduce_from_tensor_model_parallel_region(x)", ["y = (x)"]),
        ("y = _reduce(x, group)", ["y = (x)"]),
        ("y = all_to_all(self.ep_group, x, sizes)", ["y = (x)"]),
        # Its handle is waited for: without it, the run crashes for everyone to see.
        ("handle = torch.distributed.all_reduce(x, async_op=True)", []),
        ("y = reduce(x)", []),
        ("torch.add(x, y)", []),
    ],
)
def test_changes(body, becomes):
    assert changes(drop_collective, body) == becomes
