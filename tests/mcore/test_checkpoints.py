# SPDX-License-Identifier: Apache-2.0
"""What checkpoints hold: safetensors, and what Megatron and torch save and load."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ttrace.mcore.checkpoints import stored
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.states import Item, State
from tests.integration import jobs


def weight(name: str) -> Item:
    """A weight of this name."""
    return Item(State.WEIGHT, name)


def test_distributed(tmp_path: Path) -> None:
    """All tensors with their bits, and numbers; a damaged checkpoint is one line."""
    words = "-m", "tests.mcore.loaded", tmp_path / "all"
    jobs.python(*words, cwd=tmp_path, code=0)


def test_the_latest_iteration(tmp_path: Path) -> None:
    """As Megatron marks it."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    with pytest.raises(TTraceError, match="iter_0000012, which does not exist"):
        stored.open_checkpoint(tmp_path)
    (tmp_path / "iter_0000012").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "iter_0000012" / "m.safetensors")
    checkpoint = stored.open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {weight("a")}
    assert checkpoint.format is stored.Format.SAFETENSORS


def test_prefixes_of_wrappers(tmp_path: Path) -> None:
    """Formats that keep the wrappers' names hold the same weights."""
    save_file(
        {"model.module.decoder.a": torch.ones(2), "b": torch.zeros(1)}, tmp_path / "m.safetensors"
    )
    assert set(stored.open_checkpoint(tmp_path).tensors) == {weight("decoder.a"), weight("b")}


def test_files_of_an_earlier_export(tmp_path: Path) -> None:
    """The index says which files are the model's."""
    for value, shards in ((2.0, 2), (3.0, 3)):
        for number, name in enumerate("ab", 1):
            file = f"model-{number:05d}-of-{shards:05d}.safetensors"
            save_file({name: torch.full((2,), value)}, tmp_path / file)
    where = {
        name: f"model-{number:05d}-of-00002.safetensors" for number, name in enumerate("ab", 1)
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    tensors = stored.open_checkpoint(tmp_path).tensors
    assert [int(tensors[weight(name)].read()[0]) for name in "ab"] == [2, 2]


def test_a_layer_of_a_stack(tmp_path: Path) -> None:
    """Indices of the first dimensions are read on their own."""
    data = torch.randn(3, 4, 2)
    save_file({"a": data}, tmp_path / "m.safetensors")
    stack = stored.open_checkpoint(tmp_path).tensors[weight("a")]
    layer, expert = stack.at(1), stack.at(1, 3)
    assert layer is not None
    assert expert is not None
    assert (layer.shape, expert.shape) == ((4, 2), (2,))
    assert torch.equal(layer.read(), data[1])
    assert torch.equal(expert.read(), data[1, 3])
    assert torch.equal(stack.read(), data)
    assert stack.at(3) is stack.at(0, 0, 0, 0) is None
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(TTraceError, match="damaged or missing"):
        stack.read()


@pytest.mark.parametrize(
    "name",
    [
        "layers.w.experts.v",
        "layers.2.w.experts.v",
        "layers.w.experts.1.v",
        "layers.2.w.experts.1.v",
    ],
)
def test_finding_a_part(name: str) -> None:
    """Layers and experts may each be stacked or stored on their own."""
    data = torch.randn(3, 4, 5)
    stacked = data[(2 if "2" in name else slice(None), 1 if "1" in name else slice(None))]
    stored_stack = stored.Stored(tuple(stacked.shape), lambda index: stacked[index])
    stack_item = Item(State.MAIN, f"decoder.{name}")
    checkpoint = stored.Checkpoint(stored.Format.TORCH_DIST, {stack_item: stored_stack})
    item = Item(State.MAIN, "decoder.layers.2.w.experts.1.v")
    match = checkpoint.find(item)
    assert match is not None
    assert match[0] == stack_item
    assert torch.equal(match[1].read(), data[2, 1])
    assert checkpoint.find(Item(State.WEIGHT, item.name)) is None
    assert checkpoint.find(Item(State.MAIN, "decoder.layers.3.w.experts.4.v")) is None


def test_items_of_keys() -> None:
    """What each key of Megatron's is."""
    name = "decoder.layers.mlp.linear_fc1.weight"
    keys = {
        name: weight(name),
        f"optimizer.state.fp32_param.{name}": Item(State.MAIN, name),
        f"optimizer.state.param.{name}": Item(State.MAIN, name),
        f"chained_1.optimizer.state.exp_avg.{name}": Item(State.EXP_AVG, name),
        f"optimizer.state.exp_avg_sq.{name}": Item(State.EXP_AVG_SQ, name),
        f"optimizer.state.momentum_buffer.{name}": Item(State.EXP_AVG, name),
        f"optimizer.state.GG.{name}": Item(State.OTHER, name, "GG"),
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg": None,
    }
    assert {key: stored.item_of(key) for key in keys} == keys


class Harmful:
    """Unpickled, it makes a directory."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.mkdir, (self.made,)


def test_refused(tmp_path: Path) -> None:
    """Each with what to do; no pickle is opened."""
    with pytest.raises(TTraceError, match="no such directory"):
        stored.open_checkpoint(tmp_path / "absent")
    with pytest.raises(TTraceError, match="holds no checkpoint"):
        stored.open_checkpoint(tmp_path)
    for number in range(10, 60, 10):
        (tmp_path / f"iter_{number:07d}").mkdir()
    names = "iter_0000030, iter_0000040, iter_0000050 and older ones, but no latest_"
    with pytest.raises(TTraceError, match=f"has {names}.*: give the folder of one of them"):
        stored.open_checkpoint(tmp_path)
    for path in tmp_path.glob("iter_*"):
        path.rmdir()
    pickled = pickle.dumps(Harmful(tmp_path / "made"))
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").write_bytes(pickled)
    with pytest.raises(TTraceError, match="which is pickles: convert it"):
        stored.open_checkpoint(tmp_path)
    assert not (tmp_path / "made").exists()


def test_padding_of_buckets() -> None:
    """What does not begin at a multiple of 64, and ends before or at the next one."""
    sizes = (96, 32, 4000, 16, 16, 16, 64, 60)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    chunks = [
        ChunkStorageMetadata(torch.Size([start]), torch.Size([size]))
        for start, size in zip(starts, sizes, strict=True)
    ]
    bucket = TensorStorageMetadata(TensorProperties(), torch.Size([sum(sizes)]), chunks)
    assert stored._padding(bucket) == ((96, 128), (4128, 4144), (4144, 4160))
