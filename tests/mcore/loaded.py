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
from torch.distributed import checkpoint  # noqa: E402

from megatron_ttrace.mcore.checkpoints import stored  # noqa: E402
from megatron_ttrace.trace.errors import TTraceError  # noqa: E402
from megatron_ttrace.trace.states import Item, State  # noqa: E402

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

    opened = stored.open_checkpoint(folder)
    assert opened.format is stored.Format.TORCH_DIST
    assert dict(opened.numbers) == {"iteration": 12, "param_groups[wd_mult=1].step": 12}
    assert [*opened.unread] == [BUCKET]
    assert len(opened.tensors) == len(state) - 1
    for key, data in state.items():
        item = stored.item_of(key)
        tensor = opened.tensors[item] if item else opened.unread[key]
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
    of_fsdp(folder / "fsdp")


def of_fsdp(folder: Path) -> None:
    """What is in ``fsdp_dtensor``, by the names and in the form of ``torch_dist``."""
    fc1, expert = torch.randn(6, 4), torch.randn(6, 4)
    moment = torch.randn(6, 4)
    experts = "module.decoder.layers.1.mlp.experts.linear_fc1.weight2"
    gated = "module.decoder.layers.0.mlp.linear_fc1.weight"
    group = {"wd_mult": 1.0, "lr": 0.5, "step": 12}
    halves = {"_w": slice(3), "_v": slice(3, 6)}
    state = {
        "model": {f"{gated}{end}": fc1[rows] for end, rows in halves.items()}
        | {f"{experts}{end}": expert[rows] for end, rows in halves.items()}
        | {"module.decoder.layers.1.mlp.router.expert_bias": torch.ones(3)},
        "optimizer": {
            "state": {
                f"module.module.{gated}{end}": {"exp_avg": moment[rows]}
                for end, rows in halves.items()
            },
            "param_to_group_meta": {f"module.module.{gated}": group},
        },
        "iteration": 12,
        "rng_state": {"0": torch.ones(5)},
    }
    checkpoint.save(state, checkpoint_id=folder)
    opened = stored.open_checkpoint(folder)
    assert opened.format is stored.Format.FSDP_DTENSOR
    assert dict(opened.numbers) == {
        "iteration": 12,
        "param_groups[wd_mult=1].lr": 0.5,
        "param_groups[wd_mult=1].step": 12,
    }
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    wanted = {
        Item(State.WEIGHT, name): fc1,
        Item(State.MAIN, name): fc1,
        Item(State.EXP_AVG, name): moment,
        Item(State.WEIGHT, "decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight"): expert,
        Item(State.WEIGHT, "decoder.layers.1.mlp.router.expert_bias"): torch.ones(3),
    }
    assert set(opened.tensors) == set(wanted)
    for item, data in wanted.items():
        tensor = opened.tensors[item]
        assert torch.equal(tensor.read(), data)
        row = tensor.at(len(data) - 1)
        assert row is not None
        assert torch.equal(row.read(), data[-1])


if __name__ == "__main__":
    try:
        steps(Path(sys.argv[1]))
    finally:
        # Megatron's queue of results has a process, which a fork does not end by itself.
        for child in multiprocessing.active_children():
            child.terminate()
