# SPDX-License-Identifier: Apache-2.0
"""Items left out."""

import pytest

from megatron_ttrace.evaluation.mutants.operators import skip_item
from tests.evaluation.mutants.changes import changes


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        ("for b in self.buckets: f(b)", ["for b in list(self.buckets)[1:]: f(b)"]),
        (
            "for p, g in zip(params, grads): f(p)",
            ["for p, g in list(zip(params, grads))[1:]: f(p)"],
        ),
        ("for i in range(3): f(i)", []),
    ],
)
def test_changes(body, becomes):
    assert changes(skip_item, body) == becomes
