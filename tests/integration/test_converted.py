# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Megatron's jobs saved, against models of Hugging Face with the same weights."""

import functools
import json
from pathlib import Path

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
from tests.integration.jobs import PP, TP, torchrun, ttrace
from tests.saved.huggingface import made
from tests.saved.huggingface.jobs import TWINS, arguments

EP = ("--expert-model-parallel-size", "2")
SP = (*TP, "--sequence-parallel")
SAVING = (
    "--lr 0 --min-lr 0 --weight-decay 0 --make-vocab-size-divisible-by 64 --eval-iters 0 "
    "--ckpt-format torch_dist --no-save-optim --no-save-rng --save-interval 1"
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
        ("qwen2", (TP, PP)),
        ("llama", (TP, PP)),
        ("qwen3", (PP, TP)),
        ("mixtral", (EP, PP)),
        ("qwen3_moe", (EP, (*EP, *PP), SP)),
        # A checkpoint has each block that a Mamba mixer stacks in a tensor of its own.
        ("nemotron_h-latent", (SP,)),
    ],
)
def test_layouts(name: str, layouts: tuple[tuple[str, ...], ...], tmp_path: Path) -> None:
    """Weights that are saved in one layout, loaded in another and saved again remain the same."""
    twin, model = TWINS[name], tmp_path / "model"
    config = twin.write(model, mlp_only_layers=[], conv_kernel=4)
    load: tuple[str, ...] = ()
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        ranks = 4 if {EP[0], PP[0]} <= set(layout) else 2
        job = arguments(twin, (*SAVING, *layout, *load, "--save", str(folder)))
        torchrun(ranks, launch_dir() / twin.script, *job, cwd=tmp_path, code=0)
        if not number:
            checkpoint = with_blocks_stacked(open_checkpoint(folder))
            state = made.files_of(read_config(config), functools.partial(weight, checkpoint))
            save_file(state, model / "model.safetensors")
        done = ttrace("checkpoint", "--json", model, folder, cwd=tmp_path, code=0)
        assert json.loads(done.stdout)["same"]
        load = (*LOADING, "--load", str(folder))
