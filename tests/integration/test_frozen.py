# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters: no gradient and no update is expected of them, everything else is judged."""

from pathlib import Path

import pytest

from megatron_ttrace.trace.records import Kind
from tests.integration.jobs import PP, TP, ZERO, check

UPDATED = {Kind.MAIN_GRAD, Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ}


@pytest.mark.parametrize(
    "layout",
    [
        TP,
        pytest.param((*PP, "--untie-embeddings-and-output-weights"), marks=pytest.mark.nightly),
        pytest.param(ZERO, marks=pytest.mark.nightly),
    ],
    ids=["tp", "pp", "zero"],
)
def test_frozen_parameters(layout: tuple[str, ...], tmp_path: Path) -> None:
    """Equivalent; their values are still compared, before the step and after."""
    checked = check(tmp_path, *layout, mistake="frozen_in_part")
    kinds = {
        part: {verdict.kind for verdict in checked.verdicts if part in verdict.name}
        for part in ("self_attention", "mlp.linear_fc1")
    }
    assert kinds["mlp.linear_fc1"] >= UPDATED
    assert Kind.PARAM in kinds["self_attention"]
    assert not UPDATED & kinds["self_attention"]
