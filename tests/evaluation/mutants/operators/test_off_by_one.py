# SPDX-License-Identifier: Apache-2.0
"""Offsets, bounds and masks off by one."""

import pytest

from megatron_ttrace.evaluation.mutants.operators import off_by_one
from tests.evaluation.mutants.changes import changes


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        ("mask = ids < self.vocab_start_index", ["mask = ids <= self.vocab_start_index"]),
        ("mask = ids >= end_index", ["mask = ids > end_index"]),
        ("if rank > last: pass", ["if rank >= last: pass"]),
        ("y = ids - start_index", ["y = ids - (start_index + 1)"]),
        ("y = offset + n", ["y = (offset + 1) + n"]),
        ("start_index = rank * n", ["start_index = rank * n + 1"]),
        ("y = x[a:b]", ["y = x[(a) + 1 : (b) + 1]"]),
        # Shapes and other numbers.
        ("y = x[:b]", []),
        ("if a < b: pass", []),
        ("if rank == 0: pass", []),
        ("size = rank * n", []),
    ],
)
def test_changes(body, becomes):
    assert changes(off_by_one, body) == becomes
