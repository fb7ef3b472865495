# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Megatron writes, resharded by it."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, torchrun, ttrace
from tests.integration.test_loaded import BUCKETS

JOB = (
    *("--bf16", "--swiglu", "--ckpt-format", "torch_dist"),
    *("--save-interval", 1, "--train-iters", 1),
)


@pytest.mark.nightly
def test_shifted_optimizer_state(tmp_path: Path) -> None:
    """Megatron saves main weights and moments of other places (megatron-core 0.19)."""
    for folder, buckets in (("plain", ()), ("shifted", BUCKETS)):
        words = (*TINY, *JOB, *buckets, "--save", folder)
        torchrun(2, SCRIPT, *words, cwd=tmp_path, code=0)
    done = ttrace("checkpoint", "--json", "plain", "shifted", cwd=tmp_path, code=1)
    answer = json.loads(done.stdout)
    assert {one["same"] for one in answer["weights"]} == {"same"}
    wrong = [one for one in answer["optimizer"] if one["same"] == "different"]
    assert {one["state"] for one in wrong} == {"main weight", "exp_avg", "exp_avg_sq"}
    assert sum(one["note"].endswith("in B they do not round to the weights") for one in wrong) > 8
