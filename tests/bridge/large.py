# SPDX-License-Identifier: Apache-2.0
"""A Llama of 8 billion parameters on 64 GPUs: ``large.py [SECTION.FIELD=VALUE ...]``."""

import sys

from common import configuration
from job import assign
from megatron.bridge import AutoBridge
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from transformers import LlamaConfig

hf = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    architectures=["LlamaForCausalLM"],
)
model = AutoBridge.from_hf_config(hf).to_megatron_provider(load_weights=False)
model.tensor_model_parallel_size = 8
model.sequence_parallel = True
cfg = configuration(model)
model.seq_length = cfg.dataset.seq_length = 8192
cfg.train.train_iters, cfg.train.global_batch_size = 100000, 512
cfg.checkpoint.save = cfg.checkpoint.load = "/checkpoints/llama"
for word in sys.argv[1:]:
    assign(cfg, word)
pretrain(cfg, forward_step)
