# SPDX-License-Identifier: Apache-2.0
"""Buffers that keep what they held."""

import pytest

from megatron_ttrace.evaluation.mutants.operators import stale_buffer
from tests.evaluation.mutants.changes import changes


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        ("a.data.copy_(b)", ["None"]),
        ("a.zero_()", ["None"]),
        ("a.fill_(1)", ["None"]),
        ("y = a.clone() + 1", ["y = (a) + 1"]),
        # Its result is used: nothing is left that could be meant.
        ("y = torch.empty(3).fill_(1)", []),
        ("y = torch.clone(a)", []),
    ],
)
def test_changes(body, becomes):
    assert changes(stale_buffer, body) == becomes
