# SPDX-License-Identifier: Apache-2.0
"""launch/pretrain_gpt.py with an initialisation that goes wrong in five ways.

Only in the run under test: the variable that asks for it is gone before the reference is started.
"""

import importlib.util
import os
from pathlib import Path

import torch

import megatron_ttrace

FAULTY = bool(os.environ.pop("INITIAL_FAULT", ""))

megatron_ttrace.enable()

from megatron.core.models.gpt import GPTModel  # noqa: E402

build = GPTModel.__init__


def draw(parameter, seed):
    """Random numbers that do not come from Megatron's states, as large as its own."""
    drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    parameter.data.copy_(drawn * 0.02)


def faulty(self, *args, **keywords):
    """Before Megatron wraps the model."""
    build(self, *args, **keywords)
    first, second = self.decoder.layers
    rank = torch.distributed.get_rank()
    first.mlp.linear_fc1.weight.data.zero_()
    if rank == 1:
        first.mlp.linear_fc2.weight.data.mul_(1.5)
    draw(second.mlp.linear_fc1.weight, 5)
    draw(self.embedding.position_embeddings.weight, rank)
    self.decoder.final_layernorm.weight.data.zero_()


if FAULTY:
    GPTModel.__init__ = faulty
spec = importlib.util.spec_from_file_location(
    "pretrain_gpt", Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"
)
training = importlib.util.module_from_spec(spec)
spec.loader.exec_module(training)
training.main()
