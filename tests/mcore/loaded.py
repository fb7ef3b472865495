# SPDX-License-Identifier: Apache-2.0
"""A program that has Megatron save a checkpoint, and reads it; see test_checkpoints.py."""

import multiprocessing
import sys
from pathlib import Path

from megatron_ttrace import cpu

cpu.activate()

import pytest  # noqa: E402
import torch  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402

from megatron_ttrace.mcore.checkpoints import stored  # noqa: E402
from megatron_ttrace.trace.errors import TTraceError  # noqa: E402

TENSORS = {
    "decoder.layers.self_attention.linear_qkv.weight": torch.randn(2, 6, 4),
    "decoder.final_layernorm.weight": torch.randn(4).bfloat16(),
    "embedding.word_embeddings.weight": torch.randn(8, 4).half(),
    "whole": torch.arange(6),
}
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.param"
OPTIMIZER = {
    "optimizer.state.exp_avg.whole": torch.randn(6),
    "optimizer.state.fp32_param.whole": torch.randn(6),
    BUCKET: torch.randn(9),
}
GROUPS = {"optimizer": {"param_groups": [{"step": 12}]}}


def steps(folder: Path) -> None:
    """The assertions."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    made = dist_checkpointing.ShardedTensor.from_rank_offsets
    state = {**TENSORS, **OPTIMIZER}
    sharded = {name: made(name, data.clone()) for name, data in state.items()}
    home = folder / "iter_0000012"
    home.mkdir(parents=True)
    dist_checkpointing.save({**sharded, "iteration": 12, "optimizer": GROUPS}, str(home))
    (folder / "latest_checkpointed_iteration.txt").write_text("12\n")
    torch.distributed.destroy_process_group()

    checkpoint = stored.open_checkpoint(folder)
    assert (checkpoint.iteration, checkpoint.format) == (12, stored.Format.TORCH_DIST)
    assert dict(checkpoint.numbers) == {"iteration": 12, "param_groups[].step": 12}
    assert [*checkpoint.unread] == [BUCKET]
    assert len(checkpoint.tensors) == len(state) - 1
    for key, data in state.items():
        item = stored.item_of(key)
        tensor = checkpoint.tensors[item] if item else checkpoint.unread[key]
        assert tensor.shape == tuple(data.shape)
        read = tensor.read()
        assert read.dtype == data.dtype
        assert torch.equal(read, data)
        part = tensor.at(1)
        assert part is not None
        assert torch.equal(part.read(), data[1])

    for file in home.glob("*.distcp"):
        file.unlink()
    with pytest.raises(TTraceError, match=r"^.*cannot be loaded \(.*distcp'\)$"):
        tensor.read()


if __name__ == "__main__":
    try:
        steps(Path(sys.argv[1]))
    finally:
        # Megatron's queue of results has a process, which a fork does not end by itself.
        for child in multiprocessing.active_children():
            child.terminate()
