# SPDX-License-Identifier: Apache-2.0
"""Samples whose order depends on the layout by design are not taken for a fault."""

import json
from pathlib import Path

from tests.integration.jobs import SCRIPT, TINY, ttrace

UNSHARDED = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy no_shard "
    "--transformer-impl transformer_engine --bf16"
).split()


def test_shuffled_samples(tmp_path: Path) -> None:
    """On two data-parallel ranks, here those of Megatron-FSDP without shards."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--", "torchrun", "--nproc-per-node", 2),
        *(SCRIPT, *TINY, *UNSHARDED, "--dataloader-type", "cyclic"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = (tmp_path / "ttrace-out/verdicts.jsonl").read_text().splitlines()
    tokens = [one["verdict"] for one in map(json.loads, lines) if one["kind"] == "tokens"]
    assert tokens
    assert set(tokens) == {"pass"}
