# SPDX-License-Identifier: Apache-2.0
"""A program that has Megatron save a checkpoint, and reads its weights; see test_checkpoints.py."""

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


def steps(folder: Path) -> None:
    """The assertions."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    made = dist_checkpointing.ShardedTensor.from_rank_offsets
    state = {**TENSORS, "optimizer.state.exp_avg": torch.ones(3)}
    sharded = {name: made(name, data.clone()) for name, data in state.items()}
    home = folder / "iter_0000012"
    home.mkdir(parents=True)
    dist_checkpointing.save({**sharded, "args": {"a": [1]}}, str(home))
    (folder / "latest_checkpointed_iteration.txt").write_text("12\n")

    found = stored.weights(folder)
    assert set(found) == set(TENSORS)
    for name, data in TENSORS.items():
        assert found[name].shape == tuple(data.shape)
        read = found[name].read(None)
        assert read.dtype == data.dtype
        assert torch.equal(read, data)
        assert torch.equal(found[name].read(1), data[1])

    for file in home.glob("*.distcp"):
        file.unlink()
    with pytest.raises(TTraceError, match=r"^.*cannot load this checkpoint \(.*distcp'\)$"):
        found["whole"].read(None)


if __name__ == "__main__":
    try:
        steps(Path(sys.argv[1]))
    finally:
        # Megatron's queue of results has a process, which a fork does not end by itself.
        for child in multiprocessing.active_children():
            child.terminate()
