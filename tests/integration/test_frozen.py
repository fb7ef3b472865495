# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters: no gradient and no update is expected of them, everything else is judged."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import TINY, ttrace

SCRIPT = Path(__file__).with_name("frozen.py")
UPDATED = ("main_grad", "param_delta", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ],
)
def test_frozen_parameters(layout: str, tmp_path: Path) -> None:
    """Equivalent; their values are still compared, before the step and after."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", 2, "--", SCRIPT),
        *(*TINY, *layout.split()),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = (tmp_path / "ttrace-out" / "verdicts.jsonl").read_text().splitlines()
    kinds: dict[str, set[str]] = {"self_attention": set(), "mlp.linear_fc1": set()}
    for verdict in map(json.loads, lines):
        for part in kinds:
            if part in verdict["name"]:
                kinds[part].add(verdict["kind"])
    assert set(UPDATED) <= kinds["mlp.linear_fc1"]
    assert "param" in kinds["self_attention"]
    assert not set(UPDATED) & kinds["self_attention"]
