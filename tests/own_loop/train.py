# SPDX-License-Identifier: Apache-2.0
"""A training loop of its own on megatron-core: ``ttrace check -- torchrun ... train.py 2``."""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

import megatron_ttrace

tp = 1 if megatron_ttrace.is_reference() else int(sys.argv[1])
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    tensor_model_parallel_size=tp,
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    bias_dropout_fusion=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32)
model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])


def train_batch(batches):
    """One step: this is the loop's own code."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = []
    for batch in batches:
        loss = model(batch["tokens"], batch["positions"], None, labels=batch["labels"]).mean()
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    if "--forget-to-finish" not in sys.argv:
        finalize_model_grads([model])
    optimizer.step()
    mean = torch.stack(losses).mean() / parallel_state.get_data_parallel_world_size()
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return {"lm loss": mean}


draw = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
tokens = torch.randint(0, 128, (2, 1, 33), generator=draw)
positions = torch.arange(32)[None]
batches = [{"tokens": t[:, :-1], "labels": t[:, 1:], "positions": positions} for t in tokens]
print(megatron_ttrace.step(train_batch, model, optimizer, batches))
