# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Megatron's jobs saved, against models of Hugging Face with the same weights."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.mcore.checkpoints.stored import (
    Checkpoint,
    open_checkpoint,
    with_blocks_stacked,
)
from megatron_ttrace.saved.huggingface.families import read_config
from megatron_ttrace.trace.states import Item, State
from tests.assay.planted.train import SCRIPT
from tests.integration.jobs import PP, TP, torchrun, ttrace
from tests.saved.huggingface import made
from tests.saved.huggingface.jobs import TWINS, arguments

EP = ("--expert-model-parallel-size", 2)
TE = ("--transformer-impl", "transformer_engine")


def words(config: dict[str, Any]) -> list[object]:
    """Megatron's arguments of a model."""
    model = (
        "--hidden-size 16 --ffn-hidden-size 12 --num-layers 2 --num-attention-heads 4 "
        "--group-query-attention --swiglu --normalization RMSNorm --disable-bias-linear "
        "--position-embedding-type rope --transformer-impl local "
        f"--num-query-groups {config['num_key_value_heads']} --kv-channels {config['head_dim']}"
    ).split()
    flags: dict[str, bool] = {
        "--untie-embeddings-and-output-weights": not config["tie_word_embeddings"],
        "--add-qkv-bias": config["model_type"] == "qwen2",
        "--qk-layernorm": config["model_type"].startswith("qwen3"),
    }
    if experts := config.get("num_experts", config.get("num_local_experts")):
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        model += (
            f"--num-experts {experts} --moe-router-topk 2 --moe-ffn-hidden-size {width}".split()
        )
        model += ["--moe-token-dispatcher-type", "alltoall"]
    return [*model, *(flag for flag, wanted in flags.items() if wanted)]


TRAINING = (
    "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 1 --lr 0 --min-lr 0 --lr-warmup-iters 0 --weight-decay 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 31 --make-vocab-size-divisible-by 16 "
    "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --ckpt-format torch_dist "
    "--no-save-optim --no-save-rng --save-interval 1"
).split()
LOADING = "--finetune --no-load-optim --no-load-rng".split()


def weight(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A weight of a checkpoint. Local layers name the norm before experts as others do."""
    norm = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    found = [checkpoint.find(Item(State.WEIGHT, one)) for one in (name, norm)]
    there = found[0] or found[1]
    assert there, name
    return there[1].read()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("qwen2", (TP, (*PP, *TE))),
        ("llama", ((*TP, *TE), PP)),
        ("qwen3", (PP, (*TP, *TE))),
        ("mixtral", (EP, PP)),
        (
            "qwen3_moe",
            tuple(
                (*axes, *TE, "--moe-grouped-gemm")
                for axes in (EP, (*EP, *PP), (*TP, "--sequence-parallel"))
            ),
        ),
    ],
)
def test_layouts(name: str, layouts: tuple[tuple[object, ...], ...], tmp_path: Path) -> None:
    """Weights that are saved in one layout, loaded in another and saved again remain the same."""
    config = made.CONFIGS[name] | {"mlp_only_layers": [], "vocab_size": 32}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    load: tuple[object, ...] = ()
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        ranks = 4 if {EP[0], PP[0]} <= set(layout) else 2
        torchrun(
            *(ranks, SCRIPT, *words(config), *TRAINING, *layout, *load, "--save", folder),
            cwd=tmp_path,
            code=0,
        )
        if not number:
            state = made.files_of(config, functools.partial(weight, open_checkpoint(folder)))
            save_file(state, model / "model.safetensors")
        done = ttrace("checkpoint", "--json", model, folder, cwd=tmp_path, code=0)
        assert json.loads(done.stdout)["same"]
        load = (*LOADING, "--load", folder)


@pytest.mark.nightly
def test_mixed_layers(tmp_path: Path) -> None:
    """A checkpoint has each block that a Mamba mixer stacks in a tensor of its own."""
    twin = TWINS["nemotron_h-latent"]
    model, folder = twin.write(tmp_path / "model", conv_kernel=4), tmp_path / "saved"
    saving = ("--save", str(folder), "--save-interval", "1", "--eval-iters", "0")
    job = arguments(twin, (*saving, "--make-vocab-size-divisible-by", "64"))
    script = launch_dir() / twin.script
    torchrun(2, script, *job, *TP, "--sequence-parallel", cwd=tmp_path, code=0)
    checkpoint = with_blocks_stacked(open_checkpoint(folder))
    state = made.files_of(read_config(model), functools.partial(weight, checkpoint))
    save_file(state, model.with_name("model.safetensors"))
    done = ttrace("checkpoint", "--json", model.parent, folder, cwd=tmp_path, code=0)
    assert json.loads(done.stdout)["same"]
