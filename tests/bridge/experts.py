# SPDX-License-Identifier: Apache-2.0
"""A Qwen3-MoE of Megatron-Bridge on mock data, its experts over two ranks."""

from common import SMALL, configuration
from megatron.bridge import AutoBridge
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from transformers import Qwen3MoeConfig

hf = Qwen3MoeConfig(
    **SMALL,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
    architectures=["Qwen3MoeForCausalLM"],
)
model = AutoBridge.from_hf_config(hf).to_megatron_provider(load_weights=False)
model.expert_model_parallel_size = 2
pretrain(configuration(model), forward_step)
