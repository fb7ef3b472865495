# SPDX-License-Identifier: Apache-2.0
"""Marks never set, and marks never read."""

import pytest

from megatron_ttrace.evaluation.mutants.operators import lost_mark
from tests.evaluation.mutants.changes import changes


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        ("setattr(w, 'sequence_parallel', config.sequence_parallel)", ["None"]),
        ("setattr(w, 'allreduce', not expert)", ["None"]),
        ("w.sequence_parallel = config.sequence_parallel", ["w.sequence_parallel = False"]),
        ("w.allreduce = False", ["w.allreduce = True"]),
        ("if getattr(p, 'sequence_parallel', False): pass", ["if False: pass"]),
        ("expert = not getattr(p, 'allreduce', True)", ["expert = not True"]),
        # No change, and no mark.
        ("w.sequence_parallel = False", []),
        ("setattr(w, 'colour', 1)", []),
        ("sequence_parallel = True", []),
    ],
)
def test_changes(body, becomes):
    assert changes(lost_mark, body) == becomes
